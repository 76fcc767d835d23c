"""The means as averages of iterates.

An update moves an iterate z, samples are drawn around it, and the mean follows it:

    μ ← μ + w(z − μ),   w = (η + 1)/(t + η)          at step t

The mean is then over the last 1/(η + 1) of all steps or so, recent ones weighing more, with no end to plan for. It does
what a falling learning rate does: the noise of single steps is averaged out. What is kept beside a parameter, which
holds μ, is the offset z − μ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.kernels.tensors import MeanBackup, TensorList


def averaging_weight(eta: float, step: int) -> float:
    """w at the step with this number, the first being 0; 1 without an average."""
    return float((eta + 1) / (step + 1 + eta)) if eta else 1.0


def averaged(mean: Tensor, iterate: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """The mean that has followed an iterate, and the offset that is left."""
    offset = iterate - mean
    step = weight * offset
    return mean + step, offset - step


@torch.no_grad()
def place_iterates(backup: MeanBackup, parameters: TensorList, offsets: Sequence[Tensor]) -> None:
    """Parameters become their iterates z = μ + offset; their means are put away."""
    if not parameters:
        return
    away = backup.taken(parameters) or backup.keep(parameters)
    iterates = torch._foreach_add(list(away.places), list(offsets))
    torch._foreach_copy_([p.detach() for p in parameters], iterates)


def can_average(group: Mapping[str, Any]) -> bool:
    """Whether means of this group can be averages: with less than single precision, offsets would be rounded away."""
    return all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
