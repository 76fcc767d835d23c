"""Weights that are a sample for a while."""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels.lists import Kept, Steady
from credo.kernels.scratch import expect_large_blocks


def identical(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two rows hold the same objects. Equal tensors are not enough, and comparing them would take long."""
    return len(one) == len(other) and all(map(is_, one, other))


class _Away(NamedTuple):
    """Parameters that may hold a sample, where their means are then, and whether the draw has happened."""

    parameters: Sequence[Tensor]
    kept: Kept


class MeanKeeper:
    """Memory for the mean while the parameters hold a sample; kept between steps, because fresh pages are slow.

        with keeper:        # at the end of which the means are put back, whatever has happened
            ...             # `keep` or `leave`, then a change of the parameters

    Who draws a sample puts the mean by with it, in one pass over both. A step that follows at once need not wait for
    the mean to come back either: it reads it where it is, and writes the new one into the parameters.
    """

    def __init__(self) -> None:
        self.late = (
            False  # until `restore` is called samples stay where they are, for an update that asks for `kept`
        )
        self._rooms: dict[int, Tensor] = {}
        self._away: list[_Away] = []
        expect_large_blocks()  # what comes and goes with every backward pass stays at hand too

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if not self.late:
            self.restore()

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Puts the means of parameters by, whatever will be written over them."""
        kept = self.leave(parameters, self.rooms(parameters))
        with torch.no_grad():
            torch._foreach_copy_(list(kept.places), [p.detach() for p in parameters])
        kept.done.value = 1

    def rooms(self, parameters: Sequence[Tensor]) -> Steady:
        """Memory for the means of parameters, which they have to themselves."""
        return Steady([self._room(p) for p in parameters])

    def leave(self, parameters: Sequence[Tensor], rooms: Steady) -> Kept:
        """Has the draw of a sample put the means by in these rooms. They must be in the parameters."""
        kept = Kept(rooms)
        self._away.append(_Away(parameters, kept))
        return kept

    def kept(self, parameters: Sequence[Tensor]) -> Kept | None:
        """Where the means are, if not in the parameters; if only some are away, they are put back."""
        for away in self._away:
            if away.kept.done.value and identical(away.parameters, parameters):
                return away.kept
        if self._away:
            wanted = set(map(id, parameters))
            if any(id(p) in wanted for away in self._away for p in away.parameters):
                self.restore()
        return None

    def replaced(self, kept: Kept) -> None:
        """The parameters hold new means, and what was `kept` of the old ones is forgotten."""
        self._away = [away for away in self._away if away.kept is not kept]

    def restore(self) -> None:
        """Puts all means back that are away. In one call: on a small network calls take longer than copies."""
        self.late = False
        if not self._away:
            return
        done = [away for away in self._away if away.kept.done.value]
        if done:
            with torch.no_grad():
                torch._foreach_copy_(
                    [p.detach() for away in done for p in away.parameters],
                    [room for away in done for room in away.kept.places],
                )
        self._away = []

    def _room(self, p: Tensor) -> Tensor:
        room = self._rooms.get(id(p))
        if room is None or not (room.shape == p.shape and room.dtype is p.dtype and room.device == p.device):
            room = self._rooms[id(p)] = torch.empty_like(p.detach())
        return room
