"""Weights that are a sample for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels.noise import Kept
from credo.kernels.scratch import expect_large_blocks


class _Away(NamedTuple):
    """A parameter that may hold a sample, where its mean is then, and whether the draw has happened."""

    parameter: Tensor
    kept: Tensor
    draw: Kept


class MeanKeeper:
    """Memory for the mean while the parameters hold a sample; kept between steps, because fresh pages are slow.

    Who draws a sample puts the mean by with it, in one pass over both. A step that follows at once need not wait for
    the mean to come back either: it reads it where it is, and writes the new one into the parameters.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, Tensor] = {}
        self._away: dict[int, _Away] = {}
        self._late = False
        expect_large_blocks()  # what comes and goes with every backward pass stays at hand too

    @contextmanager
    def in_place(self, draw: Callable[[], None]) -> Iterator[None]:
        """Lets `draw` change parameters, after `keep` or `leave`, and puts the means back whatever happens."""
        try:
            draw()
            yield
        finally:
            if not self._late:
                self.restore()

    @contextmanager
    def late(self, allowed: bool) -> Iterator[None]:
        """Until the end of this, blocks leave their samples where they are, for an update that knows of `origins`."""
        self._late = allowed
        try:
            yield
        finally:
            self._late = False
            self.restore()

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Puts the means of parameters by, whatever will be written over them."""
        kept = self.leave(parameters)
        with torch.no_grad():
            torch._foreach_copy_(list(kept.places), [p.detach() for p in parameters])
        kept.done.value = 1

    def leave(self, parameters: Sequence[Tensor]) -> Kept:
        """Where the draw of a sample has to put the means of parameters by. They must be in the parameters."""
        kept = Kept([self._room(p) for p in parameters])
        for p, room in zip(parameters, kept.places, strict=True):
            self._away[id(p)] = _Away(p, room, kept)
        return kept

    def kept(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Where the means are, if not in the parameters; if only some are away, they are put back."""
        if not self._away:
            return None
        away = [self._away.get(id(p)) for p in parameters]
        rooms = [one.kept for one in away if one is not None and one.draw.done.value]
        if len(rooms) == len(away):
            return rooms
        self.restore()
        return None

    def replaced(self, parameters: Sequence[Tensor]) -> None:
        """The parameters hold new means, and what was kept of the old ones is forgotten."""
        for p in parameters:
            self._away.pop(id(p), None)

    def restore(self) -> None:
        """Puts all means back that are away. In one call: on a small network calls take longer than copies."""
        away = [one for one in self._away.values() if one.draw.done.value]
        if away:
            with torch.no_grad():
                torch._foreach_copy_([one.parameter.detach() for one in away], [one.kept for one in away])
        self._away.clear()

    def _room(self, p: Tensor) -> Tensor:
        room = self._rooms.get(id(p))
        if room is None or not (room.shape == p.shape and room.dtype is p.dtype and room.device == p.device):
            room = self._rooms[id(p)] = torch.empty_like(p.detach())
        return room
