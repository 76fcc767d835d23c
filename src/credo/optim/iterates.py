"""Means that are averages: updates move an iterate z, samples are drawn around it, and the mean follows it.

    μ ← μ + w(z − μ),   w = (η + 1)/(t + η)          at step t

The mean is then over the last 1/(η + 1) of all steps or so, recent ones weighing more, with no end to plan for. It does
what a falling learning rate does: the noise of single steps is averaged out. What is kept beside a parameter, which
holds μ, is the offset z − μ.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from credo.optim.sampling import MeanKeeper

Moved: TypeAlias = Sequence[tuple[Tensor, Tensor]]  # parameters, each with its offset


def weight(eta: float, step: int) -> float:
    """w at the step with this number, the first being 0; 1 without an average."""
    return float((eta + 1) / (step + 1 + eta)) if eta else 1.0


@torch.no_grad()
def place_iterates(keeper: MeanKeeper, moved: Moved) -> None:
    """Parameters become their iterates z = μ + offset; their means are put by."""
    if not moved:
        return
    parameters = [p for p, _ in moved]
    away = keeper.kept(parameters)
    if away is None:
        keeper.keep(parameters)
    means = [p.detach() for p in parameters] if away is None else list(away.places)
    iterates = torch._foreach_add(means, [offset for _, offset in moved])
    torch._foreach_copy_([p.detach() for p in parameters], iterates)


def follow_(means: list[Tensor], offsets: list[Tensor], iterates: Sequence[Tensor], weight: float) -> None:
    """μ ← μ + w(z − μ) for iterates that have moved, and the new offsets."""
    torch._foreach_copy_(offsets, torch._foreach_sub(list(iterates), means))
    steps = torch._foreach_mul(offsets, weight)
    torch._foreach_sub_(offsets, steps)
    torch._foreach_add_(means, steps)
