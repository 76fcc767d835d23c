"""One message a step: all sums of all parameters, and how many examples they are of, in a row."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from credo.distributed.world import World
from credo.kernels.scratch import LIMIT, scratch

Cuts = Sequence[Sequence[slice]]  # [rank][tensor]: the elements that a rank wants the sums of
Kind = TypeVar("Kind")


class Row:
    """Flat tensors side by side in one buffer, each multiplied by its rank's weight, added over the ranks.

    A tensor that a rank does not have counts as zeros; which ones nobody has is known afterwards. With `cuts` a rank
    has the sums of its own elements only: the tensors then go by a reduce-scatter, the numbers by themselves.
    Each pass over the buffer is a call or two, however many tensors there are.
    """

    def __init__(
        self,
        world: World,
        numbers: Sequence[float],
        sizes: Sequence[int],
        cuts: Cuts | None,
        like: Tensor,
    ):
        self._world, self._numbers, self._is_cut = world, list(numbers), cuts is not None
        self._cuts = [[slice(0, size) for size in sizes]] if cuts is None else cuts
        self._lengths = [[part.stop - part.start for part in parts] for parts in self._cuts]
        self._longest = max(map(sum, self._lengths))
        heads = len(numbers) + len(sizes)
        self._flat = _memory(heads + len(self._cuts) * self._longest, like)
        self._heads, self._body = self._flat[:heads], self._flat[heads:]

    def put(self, tensors: Sequence[Tensor | None], weights: Sequence[float]) -> None:
        present = [float(tensor is not None) for tensor in tensors]
        self._heads.copy_(torch.tensor([*self._numbers, *present], dtype=torch.float64))
        said = [t if weight else None for t, weight in zip(tensors, weights, strict=True)]  # not NaN · 0
        zeros = self._body.new_zeros(1).expand(self._longest)
        pieces: list[Tensor] = []
        for parts, lengths in zip(self._cuts, self._lengths, strict=True):
            for tensor, part, length in zip(said, parts, lengths, strict=True):
                pieces.append(zeros[:length] if tensor is None else tensor[part].to(zeros))
            pieces.append(zeros[: self._longest - sum(lengths)])
        torch.cat(pieces, out=self._body)
        for rank, lengths in enumerate(self._lengths):
            for start, end, weight in _stretches(lengths, weights):
                self._body[rank * self._longest :][start:end].mul_(weight)

    def add(self, is_mean: Sequence[bool]) -> tuple[list[float], list[Tensor | None]]:
        """The sums of the numbers and of the tensors, flat; None where no rank had one.

        Means are divided by the sum of the first number.
        """
        if self._is_cut:
            self._world.add_(self._heads)
            body, lengths = self._world.add_shares(self._body), self._lengths[self._world.rank]
        else:
            self._world.add_(self._flat)
            body, lengths = self._body, self._lengths[0]
        numbers, present = torch.split(self._heads, [len(self._numbers), len(lengths)])
        totals: list[float] = numbers.tolist()
        for start, end, divide in _stretches(lengths, is_mean):
            if divide and totals[0]:
                body[start:end].div_(totals[0])
        sums = torch.split(body[: sum(lengths)], lengths)
        return totals, [part if there else None for part, there in zip(sums, present.tolist(), strict=True)]


def _stretches(lengths: Sequence[int], kinds: Sequence[Kind]) -> Iterator[tuple[int, int, Kind]]:
    """Where neighbours of one kind begin and end."""
    start = end = 0
    for k, length in enumerate(lengths):
        end += length
        if k + 1 == len(lengths) or kinds[k + 1] != kinds[k]:
            yield start, end, kinds[k]
            start = end


def _memory(size: int, like: Tensor) -> Tensor:
    """Kept between steps if it is small: fresh pages cost as much as filling them. Nobody looks at the last step's."""
    return scratch("message", (size,), like) if size * like.element_size() <= LIMIT else like.new_empty(size)
