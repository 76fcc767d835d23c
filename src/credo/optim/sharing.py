"""One step of many processes: every rank ends with the sums over all of them, weighted by true example counts.

Rank r has M_r examples. A mean over its own examples counts M_r / ΣM, a sum counts 1, so that all ranks together say
what one process would have said of the whole batch. It is one message: gradients, what else the method has gathered,
counts and losses side by side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.distributed.reduction import Row
from credo.errors import CallOrderError
from credo.kernels.lists import flat, reordered
from credo.optim.shards import Shards


@dataclass(frozen=True)
class Slot:
    """A place in the message: what this rank has for it, if anything, and what to do with the sum over the ranks."""

    shape: torch.Size
    value: Tensor | None
    is_mean: bool  # over this rank's own examples; else a sum over them
    unit: float  # times the value is what is meant
    owner: Tensor  # the parameter it is about
    take: Callable[[Tensor, Tensor], None]  # the owner, or the part of it that stands in for it, and its sum


@dataclass(frozen=True)
class Counted:
    """What the ranks know together."""

    examples: float  # of one sample
    loss: float | None  # the mean over all examples; None if nobody has one, as after blocks
    draws: int


def gradient_slot(p: Tensor, is_mean: bool) -> Slot:
    def take(owner: Tensor, total: Tensor) -> None:
        owner.grad = total.to(owner.dtype).clone()

    return Slot(p.shape, p.grad, is_mean, 1.0, p, take)


def table_slot(table: dict[int, Tensor], p: Tensor, is_mean: bool, unit: float = 1.0) -> Slot:
    """What a table has for a parameter, by its id."""

    def take(owner: Tensor, total: Tensor) -> None:
        table.pop(id(p), None)
        table[id(owner)] = total

    return Slot(p.shape, table.get(id(p)), is_mean, unit, p, take)


def add_up(
    shards: Shards,
    parameters: Sequence[Tensor],
    slots: Sequence[Slot],
    examples: float,
    loss: float | None,
    counters: Mapping[str, int],
) -> Counted:
    """Gives every slot its sum. `examples` is 0 on a rank whose share of the batch is empty."""
    step, draws = counters["step"] + counters["refused"], counters["draws"]
    taken = float(examples > 0)
    weighed = 0.0 if loss is None else examples
    numbers = [
        examples,
        loss * weighed if loss is not None and weighed else 0.0,
        weighed,
        step,
        taken,
        draws * taken,
    ]
    row = _row(shards, numbers, slots, _widest(parameters))
    weights = [slot.unit * (examples if slot.is_mean else 1.0) for slot in slots]
    row.put([_flat(shards, slot) for slot in slots], weights)
    (total, losses, weighed, steps, sharers, all_draws), sums = row.add()
    _check(shards, total, steps, step)
    found = [(slot, value) for slot, value in zip(slots, sums, strict=True) if value is not None]
    if means := [value for slot, value in found if slot.is_mean]:
        torch._foreach_div_(means, total)
    for slot, value in found:
        _give(shards, slot, value)
    return Counted(total, losses / weighed if weighed else None, round(all_draws / max(sharers, 1)))


def _row(shards: Shards, numbers: Sequence[float], slots: Sequence[Slot], like: Tensor) -> Row:
    cuts = [[parts[id(slot.owner)] for slot in slots] for parts in shards.cuts] if shards.cuts else None
    return Row(shards.world, numbers, [slot.shape.numel() for slot in slots], cuts, like)


def _flat(shards: Shards, slot: Slot) -> Tensor | None:
    """Cut parameters are cut as they lie in memory."""
    if slot.value is None:
        return None
    return flat(reordered(slot.value, slot.owner)) if shards.cuts else slot.value.reshape(-1)


def _give(shards: Shards, slot: Slot, total: Tensor) -> None:
    if shards.cuts:
        slot.take(shards.stand_ins[id(slot.owner)], total)
    else:
        slot.take(slot.owner, total.view(slot.shape))


def _widest(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor like those of the message: the same on all ranks, also where one has nothing to say."""
    wide = any(p.dtype == torch.float64 for p in parameters)
    return torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=parameters[0].device)


def _check(shards: Shards, total: float, steps: float, step: int) -> None:
    """What all ranks see alike, so all of them raise."""
    world = shards.world
    if total == 0:
        raise CallOrderError(
            "no rank took a gradient sample in this step: every share of the batch was empty."
        )
    if math.isfinite(steps) and steps != step * world.size:
        raise CallOrderError(
            f"ranks are at different steps: this one (rank {world.rank}) is at step {step}, the mean is "
            f"{steps / world.size:g}. All must take the same number of steps; resume all from one checkpoint."
        )
