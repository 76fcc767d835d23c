"""How ranks divide a row of tensors, or a list of jobs, among them."""

from collections.abc import Sequence
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


def assign(costs: Sequence[float], parts: int, loads: Sequence[float] = ()) -> list[int]:
    """Job → part: the most costly first, each to whoever has least to do so far; every rank finds the same.

    loads: what the parts have to do already.
    """
    loads, owners = list(loads) or [0.0] * parts, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owners[job] = min(range(parts), key=lambda part: (loads[part], part))
        loads[owners[job]] += costs[job]
    return owners
