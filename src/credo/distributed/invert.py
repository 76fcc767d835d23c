"""Who inverts which Kronecker factor: each rank some of them, of about the same cost, and then all have all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from credo.distributed.dividing import assign
from credo.distributed.world import World
from credo.errors import InvalidValue

if TYPE_CHECKING:
    from credo.optim.kronecker import KroneckerLayer

SIDES = ("output", "input")  # of a layer: each has a factor


def invert_together(world: World, layers: Sequence["KroneckerLayer"], form: str) -> None:
    """Refreshes the roots of the layers. A factor that one rank cannot invert is an error on all of them."""
    jobs = [(layer, side) for layer in layers for side in SIDES]
    owners = assign([_cost(layer.state[f"{side}_factor"]) for layer, side in jobs], world.size)
    own_error: Exception | None = None
    for (layer, side), owner in zip(jobs, owners, strict=True):
        if owner != world.rank:
            layer.expect_side(side, form)
            continue
        try:
            layer.invert_side(side, form)
        except (InvalidValue, RuntimeError) as error:  # torch's LinAlgError is a RuntimeError
            own_error = own_error or error
            layer.expect_side(side, form)
    _refuse_together(world, own_error)
    rows: list[list[Tensor]] = [[] for _ in range(world.size)]
    for (layer, side), owner in zip(jobs, owners, strict=True):
        rows[owner] += layer.inverted_side(side, form)
    world.exchange_(rows)


def invert_own(world: World, layers: Sequence["KroneckerLayer"], form: str) -> None:
    """Refreshes the roots of layers that no other rank has; all ranks come here, and an error is one on all."""
    own_error: Exception | None = None
    try:
        for layer in layers:
            layer.invert(form)
    except (InvalidValue, RuntimeError) as error:
        own_error = error
    _refuse_together(world, own_error)


def _cost(factor: Tensor) -> float:
    """d³ for each of the groups of a layer."""
    return float(factor.numel() * factor.shape[-1])


def _refuse_together(world: World, own: Exception | None) -> None:
    texts = world.gather_texts("" if own is None else str(own))
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text:
            raise InvalidValue(f"rank {rank} could not invert a Kronecker factor: {text}")
