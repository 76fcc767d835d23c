"""Where a row of tensors is cut when several ranks share it."""

from functools import lru_cache
from itertools import accumulate


@lru_cache(maxsize=64)
def cut(sizes: tuple[int, ...], parts: int) -> list[list[slice]]:
    """[part][tensor]: which elements of a tensor lie in a part, when all of them side by side are cut into equal parts.

    The parts have ⌈Σ sizes / parts⌉ elements, the last ones fewer or none; a tensor may be cut anywhere.
    """
    most = -(-sum(sizes) // parts)
    starts = [0, *accumulate(sizes)]
    return [
        [
            slice(min(max(part * most - start, 0), size), min(max((part + 1) * most - start, 0), size))
            for start, size in zip(starts, sizes, strict=False)
        ]
        for part in range(parts)
    ]
