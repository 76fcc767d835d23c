"""One message a step: all sums of all parameters, and how many examples they are of, in a row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.distributed.world import World


class Row:
    """Tensors side by side in one flat buffer, each multiplied by its rank's weight, added over the ranks.

    A tensor that a rank does not have counts as zeros; which ones nobody has is known afterwards.
    """

    def __init__(self, world: World, numbers: Sequence[float], shapes: Sequence[torch.Size], like: Tensor):
        self._world, self._count, self._shapes = world, len(numbers), shapes
        sizes = [shape.numel() for shape in shapes]
        self._flat = like.new_zeros(len(numbers) + len(shapes) + sum(sizes))
        self._numbers, self._present, rest = torch.split(self._flat, [len(numbers), len(shapes), sum(sizes)])
        self._parts = torch.split(rest, sizes)
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64))

    def put(self, tensors: Sequence[Tensor | None], weights: Sequence[float]) -> None:
        for k, (tensor, weight) in enumerate(zip(tensors, weights, strict=True)):
            if tensor is not None:
                self._present[k] = 1
                if weight:  # else NaN · 0 of an empty share would spoil the sum
                    self._parts[k].copy_(tensor.reshape(-1)).mul_(weight)

    def add(self) -> tuple[list[float], list[Tensor | None]]:
        """The sums of the numbers and of the tensors; None where no rank had one."""
        self._world.add_(self._flat)
        heads = self._flat[: self._count + len(self._shapes)].tolist()
        present = heads[self._count :]
        sums = [
            part.view(shape) if there else None
            for part, shape, there in zip(self._parts, self._shapes, present, strict=True)
        ]
        return heads[: self._count], sums
