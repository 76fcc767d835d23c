"""One step of many processes: every rank ends with the sums over all of them, weighted by true example counts.

Rank r has M_r examples. A mean over its own examples counts M_r / ΣM, a sum counts 1, so that all ranks together say
what one process would have said of the whole batch. It is one message: gradients, what else the method has gathered,
counts and losses side by side.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from credo.distributed.world import World
from credo.errors import CallOrderError
from credo.kernels.scratch import LIMIT, scratch
from credo.kernels.tensors import flat, in_order_of, reordered

if TYPE_CHECKING:
    from credo.distributed.sharding import Reducer

Sums = Sequence[Tensor | None]  # None where no rank had a value
Take = Callable[[Sequence[Tensor], Sums], None]  # of the owners, or of the parts that stand in for them


@dataclass(frozen=True)
class NamedSums:
    """One tensor for each of some parameters, where this rank has it, and what to do with the sums over the ranks."""

    owners: Sequence[Tensor]  # the parameters it is about
    shapes: Sequence[torch.Size]
    values: Sequence[Tensor | None]
    is_mean: bool  # over this rank's own examples; else a sum over them
    unit: float  # times a value is what is meant
    take: Take


def gradients(parameters: Sequence[Tensor], is_mean: bool) -> NamedSums:
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

    return NamedSums(
        parameters, [p.shape for p in parameters], [p.grad for p in parameters], is_mean, 1.0, take
    )


def tabled(
    known: dict[int, Tensor], parameters: Sequence[Tensor], is_mean: bool, unit: float = 1.0
) -> NamedSums:
    """What a table has for the parameters, by their ids."""

    def take(owners: Sequence[Tensor], sums: Sums) -> None:
        known.clear()
        known.update({id(p): total for p, total in zip(owners, sums, strict=True) if total is not None})

    values = [known.get(id(p)) for p in parameters]
    return NamedSums(parameters, [p.shape for p in parameters], values, is_mean, unit, take)


T = TypeVar("T")


@dataclass(frozen=True)
class Counted:
    """What the ranks know together."""

    examples: float  # of one sample
    loss: float | None  # of all examples, as the ranks' own are; None if nobody has one, as after blocks
    draws: int


def add_up(
    reducer: "Reducer",
    parameters: Sequence[Tensor],
    columns: Sequence[NamedSums],
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
    row = _row(reducer, numbers, columns, _widest(parameters))
    lengths = [len(column.owners) for column in columns]
    weights = [column.unit * (examples if column.is_mean else taken) for column in columns]
    row.put(_flat_values(reducer, columns), _repeated(weights, lengths))
    (total, losses, weighed, steps, sharers, all_draws), sums = row.add(
        _repeated([column.is_mean for column in columns], lengths)
    )
    _check(reducer, total, steps, step)
    for column, start in zip(columns, accumulate(lengths, initial=0), strict=False):
        _give(reducer, column, sums[start : start + len(column.owners)])
    common = losses / (weighed if mean_loss else 1.0) if weighed else None
    return Counted(total, common, round(all_draws / max(sharers, 1)))


def _row(
    reducer: "Reducer", numbers: Sequence[float], columns: Sequence[NamedSums], like: Tensor
) -> "Message":
    owners = [owner for column in columns for owner in column.owners]
    cuts = [[parts[id(owner)] for owner in owners] for parts in reducer.cuts] if reducer.cuts else None
    return Message(
        reducer.world, numbers, [shape.numel() for column in columns for shape in column.shapes], cuts, like
    )


def _repeated(values: Sequence[T], times: Sequence[int]) -> list[T]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]


def _flat_values(reducer: "Reducer", columns: Sequence[NamedSums]) -> list[Tensor | None]:
    """Cut parameters are cut as they lie in memory."""
    pairs = [pair for column in columns for pair in zip(column.values, column.owners, strict=True)]
    if reducer.cuts:
        return [None if value is None else flat(reordered(value, owner)) for value, owner in pairs]
    return [None if value is None else value.reshape(-1) for value, _ in pairs]


def _give(reducer: "Reducer", column: NamedSums, sums: Sums) -> None:
    if reducer.cuts:
        column.take([reducer.local_parts[id(owner)] for owner in column.owners], sums)
    else:
        shaped = zip(sums, column.shapes, strict=True)
        column.take(column.owners, [None if total is None else total.view(shape) for total, shape in shaped])


def _widest(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor like those of the message: the same on all ranks, also where one has nothing to say."""
    wide = any(p.dtype == torch.float64 for p in parameters)
    return torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=parameters[0].device)


def _check(reducer: "Reducer", total: float, steps: float, step: int) -> None:
    """What all ranks see alike, so all of them raise."""
    world = reducer.world
    if total == 0:
        raise CallOrderError(
            "no rank took a gradient sample in this step: every share of the batch was empty."
        )
    if math.isfinite(steps) and steps != step * world.size:
        raise CallOrderError(
            f"ranks are at different steps: this one (rank {world.rank}) is at step {step}, the mean is "
            f"{steps / world.size:g}. All must take the same number of steps; resume all from one checkpoint."
        )


Cuts = Sequence[Sequence[slice]]  # [rank][tensor]: the elements that a rank wants the sums of
Kind = TypeVar("Kind")


class Message:
    """Flat tensors side by side in one buffer, each multiplied by its rank's weight, added over the ranks.

    A tensor that a rank does not have counts as zeros; which ones nobody has is known afterwards. With `cuts` a rank
    has the sums of its own elements only: the tensors then go by a reduce-scatter, the numbers by themselves.
    Each pass over the buffer is a call or two, however many tensors there are.
    """

    def __init__(
        self,
        world: World,
        numbers: Sequence[float],
        sizes: Sequence[int],
        cuts: Cuts | None,
        like: Tensor,
    ):
        self._world, self._numbers, self._is_cut = world, list(numbers), cuts is not None
        self._cuts = [[slice(0, size) for size in sizes]] if cuts is None else cuts
        self._lengths = [[part.stop - part.start for part in parts] for parts in self._cuts]
        self._longest = max(map(sum, self._lengths))
        heads = len(numbers) + len(sizes)
        self._flat = _memory(heads + len(self._cuts) * self._longest, like)
        self._heads, self._body = self._flat[:heads], self._flat[heads:]

    def put(self, tensors: Sequence[Tensor | None], weights: Sequence[float]) -> None:
        present = [float(tensor is not None) for tensor in tensors]
        self._heads.copy_(torch.tensor([*self._numbers, *present], dtype=torch.float64))
        said = [t if weight else None for t, weight in zip(tensors, weights, strict=True)]  # not NaN · 0
        zeros = self._body.new_zeros(1).expand(self._longest)
        pieces: list[Tensor] = []
        for parts, lengths in zip(self._cuts, self._lengths, strict=True):
            for tensor, part, length in zip(said, parts, lengths, strict=True):
                pieces.append(zeros[:length] if tensor is None else tensor[part].to(zeros))
            pieces.append(zeros[: self._longest - sum(lengths)])
        torch.cat(pieces, out=self._body)
        for rank, lengths in enumerate(self._lengths):
            for start, end, weight in _stretches(lengths, weights):
                self._body[rank * self._longest :][start:end].mul_(weight)

    def add(self, is_mean: Sequence[bool]) -> tuple[list[float], list[Tensor | None]]:
        """The sums of the numbers and of the tensors, flat; None where no rank had one.

        Means are divided by the sum of the first number.
        """
        if self._is_cut:
            self._world.add_(self._heads)
            body, lengths = self._world.add_shares(self._body), self._lengths[self._world.rank]
        else:
            self._world.add_(self._flat)
            body, lengths = self._body, self._lengths[0]
        numbers, present = torch.split(self._heads, [len(self._numbers), len(lengths)])
        totals: list[float] = numbers.tolist()
        for start, end, divide in _stretches(lengths, is_mean):
            if divide and totals[0]:
                body[start:end].div_(totals[0])
        sums = torch.split(body[: sum(lengths)], lengths)
        return totals, [part if there else None for part, there in zip(sums, present.tolist(), strict=True)]


def _stretches(lengths: Sequence[int], kinds: Sequence[Kind]) -> Iterator[tuple[int, int, Kind]]:
    """Where neighbours of one kind begin and end."""
    start = end = 0
    for k, length in enumerate(lengths):
        end += length
        if k + 1 == len(lengths) or kinds[k + 1] != kinds[k]:
            yield start, end, kinds[k]
            start = end


def _memory(size: int, like: Tensor) -> Tensor:
    """Kept between steps if it is small: fresh pages cost as much as filling them. Nobody looks at the last step's."""
    return scratch("message", (size,), like) if size * like.element_size() <= LIMIT else like.new_empty(size)
