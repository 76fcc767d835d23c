"""One message a step: all sums of all parameters, and how many examples they are of, in a row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.distributed.world import World
from credo.kernels.scratch import LIMIT, scratch

Cuts = Sequence[Sequence[slice]]  # [rank][tensor]: the elements that a rank wants the sums of


class Row:
    """Flat tensors side by side in one buffer, each multiplied by its rank's weight, added over the ranks.

    A tensor that a rank does not have counts as zeros; which ones nobody has is known afterwards. With `cuts` a rank
    has the sums of its own elements only: the tensors then go by a reduce-scatter, the numbers by themselves.
    """

    def __init__(
        self,
        world: World,
        numbers: Sequence[float],
        sizes: Sequence[int],
        cuts: Cuts | None,
        like: Tensor,
    ):
        self._world, self._count, self._is_cut = world, len(numbers), cuts is not None
        self._cuts = [[slice(0, size) for size in sizes]] if cuts is None else cuts
        self._lengths = [[part.stop - part.start for part in parts] for parts in self._cuts]
        self._longest = max(map(sum, self._lengths))
        heads = len(numbers) + len(sizes)
        self._numbers = list(numbers)
        self._flat = _memory(heads + len(self._cuts) * self._longest, like)
        self._heads, self._body = self._flat[:heads], self._flat[heads:]
        self._places = self._find_places(len(sizes))

    def _find_places(self, tensors: int) -> list[list[tuple[slice, int]]]:
        """[tensor] → which of its elements go where in the body; nothing for ranks that want none of it."""
        places: list[list[tuple[slice, int]]] = [[] for _ in range(tensors)]
        for rank, (parts, lengths) in enumerate(zip(self._cuts, self._lengths, strict=True)):
            start = rank * self._longest
            for k, length in enumerate(lengths):
                if length:
                    places[k].append((parts[k], start))
                    start += length
        return places

    def put(self, tensors: Sequence[Tensor | None], weights: Sequence[float]) -> None:
        present = [float(tensor is not None) for tensor in tensors]
        self._heads.copy_(torch.tensor([*self._numbers, *present], dtype=torch.float64))
        for k, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
            if tensor is not None and weight:  # NaN · 0 of an empty share would spoil the sum
                self._put(k, tensor, weight)
            else:
                for part, start in self._places[k]:
                    self._body[start : start + part.stop - part.start].zero_()

    def _put(self, k: int, tensor: Tensor, weight: float) -> None:
        for part, start in self._places[k]:
            own, place = tensor[part], self._body[start : start + part.stop - part.start]
            if own.dtype is place.dtype and own.device == place.device:
                torch.mul(own, weight, out=place)
            else:
                place.copy_(own).mul_(weight)

    def add(self) -> tuple[list[float], list[Tensor | None]]:
        """The sums of the numbers and of the tensors, flat; None where no rank had one."""
        if self._is_cut:
            self._world.add_(self._heads)
            body, lengths = self._world.add_shares(self._body), self._lengths[self._world.rank]
        else:
            self._world.add_(self._flat)
            body, lengths = self._body, self._lengths[0]
        sums = torch.split(body[: sum(lengths)], lengths)
        heads: list[float] = self._heads.tolist()
        present = heads[self._count :]
        return heads[: self._count], [
            part if there else None for part, there in zip(sums, present, strict=True)
        ]


def _memory(size: int, like: Tensor) -> Tensor:
    """Kept between steps if it is small: fresh pages cost as much as filling them. Nobody looks at the last step's."""
    return scratch("message", (size,), like) if size * like.element_size() <= LIMIT else like.new_empty(size)
