"""The means: averages of iterates, put away while the parameters hold an iterate or a sample.

An update moves an iterate z, samples are drawn around it, and the mean follows it:

    μ ← μ + w(z − μ),   w = (η + 1)/(t + η)          at step t

The mean is then over the last 1/(η + 1) of all steps or so, recent ones weighing more, with no end to plan for. It does
what a falling learning rate does: the noise of single steps is averaged out. What is kept beside a parameter, which
holds μ, is the offset z − μ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credo.kernels.scratch import expect_large_blocks
from credo.kernels.tensors import Backup, TensorList


class _Away(NamedTuple):
    """Parameters that may hold something else, where their means are then, and whether they are there yet."""

    parameters: TensorList
    backup: Backup


@final
class MeanBackup:
    """Means that are put back at the end of a block, whatever has happened.

    A draw puts the mean away itself, in one pass over both. A step that follows at once need not wait for the mean to
    come back either: it reads it where it is, and writes the new one into the parameters (`late`).
    """

    def __init__(self) -> None:
        self.late = False  # until `restore`, samples stay where they are, for an update that asks for `taken`
        self._away: list[_Away] = []
        expect_large_blocks()  # what comes and goes with every backward pass stays at hand too

    def take(self, parameters: TensorList) -> Backup:
        """For a draw, which puts the means there. They must be in the parameters, or what is there is put back later.

        Backups are layers: what was put away last comes back first.
        """
        backup = Backup(parameters.buffers)
        self._away.append(_Away(parameters, backup))
        return backup

    @torch.no_grad()
    def keep(self, parameters: TensorList) -> Backup:
        """Puts the means away now, whatever will be written over them."""
        backup = self.take(parameters)
        if parameters:
            torch._foreach_copy_(list(backup.places), [p.detach() for p in parameters])
        backup.done.value = 1
        return backup

    def taken(self, parameters: TensorList) -> Backup | None:
        """Where the means are, if not in the parameters; if only some are away, they are put back."""
        for away in self._away:
            if away.backup.taken and away.parameters.holds(parameters):
                return away.backup
        if self._away:
            wanted = set(map(id, parameters))
            if any(id(p) in wanted for away in self._away for p in away.parameters):
                self.restore()
        return None

    def forget(self, backup: Backup) -> None:
        """The parameters hold new means."""
        self._away = [away for away in self._away if away.backup is not backup]

    def end_block(self) -> None:
        """Puts the means back, unless an update follows at once."""
        if not self.late:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all means back that are away."""
        self.late = False
        for parameters, backup in reversed(self._away):
            if backup.taken and parameters:  # a model of normalisation layers alone has no samples
                torch._foreach_copy_([p.detach() for p in parameters], list(backup.places))
        self._away = []


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
