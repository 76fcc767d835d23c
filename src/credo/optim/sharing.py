"""One step of many processes: every rank ends with the sums over all of them, weighted by true example counts.

Rank r has M_r examples. A mean over its own examples counts M_r / ΣM, a sum counts 1, so that all ranks together say
what one process would have said of the whole batch. It is one message: gradients, what else the method has gathered,
counts and losses side by side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from credo.distributed.reduction import Row
from credo.errors import CallOrderError
from credo.kernels.tensors import flat, reordered
from credo.optim.columns import Column, Sums
from credo.optim.shards import Shards

T = TypeVar("T")


@dataclass(frozen=True)
class Counted:
    """What the ranks know together."""

    examples: float  # of one sample
    loss: float | None  # of all examples, as the ranks' own are; None if nobody has one, as after blocks
    draws: int


def add_up(
    shards: Shards,
    parameters: Sequence[Tensor],
    columns: Sequence[Column],
    examples: float,
    loss: float | None,
    mean_loss: bool,
    counters: Mapping[str, int],
) -> Counted:
    """Gives every column its sums. `examples` is 0 on a rank whose share of the batch is empty."""
    step, draws = counters["step"] + counters["refused"], counters["draws"]
    taken = float(examples > 0)  # else what is in `.grad` is left from the last step
    weighed = 0.0 if loss is None else examples if mean_loss else taken
    numbers = [
        examples,
        loss * weighed if loss is not None and weighed else 0.0,
        weighed,
        step,
        taken,
        draws * taken,
    ]
    row = _row(shards, numbers, columns, _widest(parameters))
    lengths = [len(column.owners) for column in columns]
    weights = [column.unit * (examples if column.is_mean else taken) for column in columns]
    row.put(_flat_values(shards, columns), _repeated(weights, lengths))
    (total, losses, weighed, steps, sharers, all_draws), sums = row.add(
        _repeated([column.is_mean for column in columns], lengths)
    )
    _check(shards, total, steps, step)
    for column, start in zip(columns, accumulate(lengths, initial=0), strict=False):
        _give(shards, column, sums[start : start + len(column.owners)])
    common = losses / (weighed if mean_loss else 1.0) if weighed else None
    return Counted(total, common, round(all_draws / max(sharers, 1)))


def _row(shards: Shards, numbers: Sequence[float], columns: Sequence[Column], like: Tensor) -> Row:
    owners = [owner for column in columns for owner in column.owners]
    cuts = [[parts[id(owner)] for owner in owners] for parts in shards.cuts] if shards.cuts else None
    return Row(
        shards.world, numbers, [shape.numel() for column in columns for shape in column.shapes], cuts, like
    )


def _repeated(values: Sequence[T], times: Sequence[int]) -> list[T]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]


def _flat_values(shards: Shards, columns: Sequence[Column]) -> list[Tensor | None]:
    """Cut parameters are cut as they lie in memory."""
    pairs = [pair for column in columns for pair in zip(column.values, column.owners, strict=True)]
    if shards.cuts:
        return [None if value is None else flat(reordered(value, owner)) for value, owner in pairs]
    return [None if value is None else value.reshape(-1) for value, _ in pairs]


def _give(shards: Shards, column: Column, sums: Sums) -> None:
    if shards.cuts:
        column.take([shards.stand_ins[id(owner)] for owner in column.owners], sums)
    else:
        shaped = zip(sums, column.shapes, strict=True)
        column.take(column.owners, [None if total is None else total.view(shape) for total, shape in shaped])


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
