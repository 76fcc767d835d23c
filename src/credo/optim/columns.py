"""What the ranks send each other: columns of one number, or one matrix, for each of some parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.kernels.tensors import in_order_of

Sums = Sequence[Tensor | None]  # None where no rank had a value
Take = Callable[[Sequence[Tensor], Sums], None]  # of the owners, or of the parts that stand in for them


@dataclass(frozen=True)
class Column:
    """What this rank has for each owner, if anything, and what to do with the sums over the ranks."""

    owners: Sequence[Tensor]  # the parameters it is about
    shapes: Sequence[torch.Size]
    values: Sequence[Tensor | None]
    is_mean: bool  # over this rank's own examples; else a sum over them
    unit: float  # times a value is what is meant
    take: Take


def gradients(parameters: Sequence[Tensor], is_mean: bool) -> Column:
    """Sums go where the rank's own gradients are, whose memory is there already."""

    def take(owners: Sequence[Tensor], sums: Sums) -> None:
        places, totals = [], []
        for p, total in zip(owners, sums, strict=True):
            if total is None:
                continue
            if p.grad is None or p.grad.dtype is not total.dtype or not in_order_of(p.grad, total):
                p.grad = total.to(p.dtype, copy=True)
            else:
                places.append(p.grad)
                totals.append(total)
        if places:
            torch._foreach_copy_(places, totals)

    return Column(parameters, [p.shape for p in parameters], [p.grad for p in parameters], is_mean, 1.0, take)


def tabled(
    known: dict[int, Tensor], parameters: Sequence[Tensor], is_mean: bool, unit: float = 1.0
) -> Column:
    """What a table has for the parameters, by their ids."""

    def take(owners: Sequence[Tensor], sums: Sums) -> None:
        known.clear()
        known.update({id(p): total for p, total in zip(owners, sums, strict=True) if total is not None})

    values = [known.get(id(p)) for p in parameters]
    return Column(parameters, [p.shape for p in parameters], values, is_mean, unit, take)
