"""Optimisers on the parameters of FSDP2: every rank has, draws and updates its rows of each of them.

FSDP2 gathers a module's parameters for its forward and its backward pass, and scatters the gradients' average over the
ranks. In a block each rank has drawn its rows of the sample, so that what is gathered is one sample for all ranks, that
of one process. Rank r has M_r examples. Its gradient is multiplied by P·M_r/ΣM before FSDP2 averages, so that what
arrives at the parts is the mean over all examples, whatever the shares are. What a block has seen beside the gradient,
of whole tensors, goes to the parts at its end, by one reduce-scatter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from credo.distributed.reduce import Message
from credo.distributed.sharding import NOTHING, Reducer, Sharded, State
from credo.distributed.shards import ShardedParameter, Shards
from credo.distributed.world import lost, together, world
from credo.errors import CallOrderError, EmptyBatch, UnsupportedOperation

if TYPE_CHECKING:
    from credo.curvature.tracking import WatchedParameters
    from credo.optim.statistics import StepStatistics

Move = Callable[
    [Mapping[int, Tensor], int], dict[int, Tensor]
]  # sums by the ids of wholes → by those of parts
Localise = Callable[[Any, Move], None]  # gives an observation the sums of its parts


class _Factor:
    """By what gradients are multiplied on their way; no more than that is known to their hooks."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, whole: Tensor) -> None:
        if self.value != 1.0 and whole.grad is not None:
            whole.grad = whole.grad * self.value


@final
class FullyShardedReducer(Reducer):
    """`draws_parts` says whether samples are drawn in the parts, and are then the same on all ranks.

    `keeps_wholes`: whether parameters must stay gathered after a backward pass, until the block ends.
    """

    def __init__(self, shards: Shards, draws_parts: bool, keeps_wholes: bool):
        super().__init__(world(), True)
        self.alone, self.sharded, self._shards = False, True, shards
        self._keeps_wholes = keeps_wholes
        if draws_parts:
            self.stream = 0
        self._mean = True  # whether losses are means
        self._factor = _Factor()
        self._hooks: list[Any] = []
        self._passes: list[tuple[int, int]] = []  # of this block: examples here and on all ranks
        self._own = 0  # examples here of the last block that had some
        self._total = 0
        self._is_open = False
        self._aside: dict[int, Tensor] = {}  # gradients by the ids of wholes

    # Blocks

    def open_block(self, reduction: str) -> None:
        """What the parameters hold from here on is gathered anew; gradients begin at none."""
        shards = self._shards
        shards.follow()
        with together():
            shards.find_wholes()
        shards.reshard()
        shards.clear_gradients()
        self._mean, self._passes, self._is_open = reduction == "mean", [], True
        self._aside = {}
        self._hooks = [
            whole.register_post_accumulate_grad_hook(self._factor)  # type: ignore[no-untyped-call]
            for _, whole in shards.wholes()
            if whole.requires_grad
        ]
        if self._keeps_wholes:
            shards.keep_wholes()

    def before_backward(self, examples: int) -> None:
        """Of so many examples here; −1: not known."""
        if examples < 0:
            raise UnsupportedOperation(
                "the number of examples cannot be read from the operations of this model, and ranks are weighed by "
                "it. Train in one process."
            )
        self._set_aside()
        total = self._count(examples, False)
        share = self.world.size * (examples / total if self._mean else 1)
        self._factor.value = share
        self._passes.append((examples, total))

    def _count(self, examples: int, empty: bool) -> int:
        """ΣM; raises on all ranks where one has none."""
        counts = torch.tensor([float(examples), float(empty)], dtype=torch.float64, device=self._device())
        self.world.add_(counts)
        total, without = counts.tolist()
        if without:
            raise UnsupportedOperation(
                f"{without:.0f} of {self.world.size} ranks had no example in a backward pass. FSDP2 gathers "
                "parameters in every pass of every rank, so each needs one example at least: leave the last batch out "
                "(drop_last=True), or divide batches evenly."
            )
        return int(total)

    def collect(self, seen: Any, localise: Localise) -> None:
        """At the end of a block that has not failed: its sums over the ranks, in the parts. The second time nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._passes:
            return
        self._take_gradients()
        self._own, self._total = (sum(counts) for counts in zip(*self._passes, strict=True))
        self._refuse_other_shares()
        share = self._own / self._total if self._mean else 1.0
        localise(seen, lambda table, power: self._move(table, share**power))
        seen.examples = self._total

    def _set_aside(self) -> None:
        """Gradients that FSDP2 has left at the wholes, with their factor: it was told to wait, or they came late.

        A weight sample that two passes share gives its gradient after FSDP2 has been there.
        """
        for _, whole in self._shards.wholes():
            if whole.grad is not None:
                own = self._aside.get(id(whole))
                self._aside[id(whole)] = whole.grad if own is None else own + whole.grad
                whole.grad = None

    def _take_gradients(self) -> None:
        """Those that FSDP2 has brought to the parts, and those that were set aside."""
        self._set_aside()
        self._shards.take_gradients()
        rest = self._move(self._aside, 1 / self.world.size) if self._aside else {}
        for place in self._shards.places:
            if (late := rest.get(id(place.part))) is not None:
                late = late.to(place.part.dtype)
                place.part.grad = late if place.part.grad is None else place.part.grad + late

    def _refuse_other_shares(self) -> None:
        """Each pass was weighed by its own examples, and what was gathered beside is by those of the block."""
        if len(self._passes) == 1 or not self._mean:
            return
        share = self._own / self._total
        alike = all(math.isclose(own / total, share, rel_tol=1e-9) for own, total in self._passes)
        if not self.world.all(alike):
            raise UnsupportedOperation(
                "the backward passes of one block have other shares of the examples from rank to rank: here "
                f"{' and '.join(f'{own} of {total}' for own, total in self._passes)}. Give each rank the same share "
                "of all passes of a block, or put micro-batches together by optimizer.accumulate(n)."
            )

    @torch.no_grad()
    def _move(self, table: Mapping[int, Tensor], weight: float) -> dict[int, Tensor]:
        """Sums over the ranks, each times its own weight."""
        pairs = list(self._shards.wholes())
        if self.world.alone:
            return {id(place.part): table[id(whole)] for place, whole in pairs if id(whole) in table}
        values = [table.get(id(whole)) for _, whole in pairs]
        cuts = [[_slice(place, rank) for place, _ in pairs] for rank in range(self.world.size)]
        wide = any(place.part.dtype == torch.float64 for place, _ in pairs)
        like = torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=self._device())
        message = Message(self.world, [], [place.shape.numel() for place, _ in pairs], cuts, like)
        rows = [None if value is None else value.contiguous().view(-1) for value in values]
        message.put(rows, [weight] * len(rows))
        _, sums = message.add([False] * len(rows))
        return {
            id(place.part): total.view(place.part.shape)
            for (place, _), total in zip(pairs, sums, strict=True)
            if total is not None
        }

    def close_block(self, error: BaseException | None) -> None:
        """However it has ended. Raises what an error means, where that is another rank's death."""
        for hook in self._hooks:
            hook.remove()
        waiting = self._is_open and not self._passes
        self._hooks, self._is_open, self._factor.value, self._aside = [], False, 1.0, {}
        shards = self._shards
        if self._keeps_wholes:
            shards.keep_as_before()
        if error is None:
            shards.reshard()
        else:
            shards.recover()
            for _, whole in shards.wholes():
                whole.grad = None
        shards.show_gradients()
        if isinstance(error, EmptyBatch) and waiting:
            self._count(0, True)
        if error is not None and (meaning := lost(error)) is not None:
            raise meaning from error

    # Steps

    def begin_step(self) -> None:
        self._shards.follow()

    def zero_grad(self) -> None:
        self._shards.clear_gradients()

    def sum_(
        self,
        gathered: "StepStatistics",
        parameters: Sequence[Tensor],
        settings: Mapping[str, Any],
        counters: dict[str, int],
        loss: Tensor | None,
    ) -> Tensor | None:
        """The loss of all examples; all else has been added up as the blocks ended."""
        mean_loss = settings["reduction"] == "mean"
        step, weight = counters["step"] + counters["refused"], float(self._own if mean_loss else 1)
        weighed = 0.0 if loss is None else weight
        numbers = [0.0 if loss is None else float(loss) * weight, weighed, float(step)]
        row = torch.tensor(numbers, dtype=torch.float64, device=self._device())
        self.world.add_(row)
        losses, weighed, steps = row.tolist()
        if math.isfinite(steps) and steps != step * self.world.size:
            raise CallOrderError(
                f"ranks are at different steps: this one (rank {self.world.rank}) is at step {step}, the mean is "
                f"{steps / self.world.size:g}. All must take the same number of steps; resume all from one checkpoint."
            )
        if not weighed:
            return None
        like = parameters[0] if loss is None else loss
        return like.new_tensor(losses / (weighed if mean_loss else 1.0))

    def all(self, mine: bool) -> bool:
        return self.world.all(mine)

    @contextmanager
    def local_view(self, optimizer: Sharded) -> Iterator[None]:
        """The optimiser has parts at all times; wholes that were gathered before the update are not of its means."""
        try:
            yield
        finally:
            self._shards.reshard()
            self._shards.show_gradients()

    @property
    def must_catch_up(self) -> bool:
        return False

    # Parts and wholes

    def drawing(self, optimizer: Sharded) -> AbstractContextManager[None]:
        return NOTHING

    def seen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What operations in a block see of parts."""
        found = []
        for p in parameters:
            place = self._shards.of_part(p)
            found.append(p if place is None or place.whole is None else place.whole)
        return found

    def watch(self, watched: "WatchedParameters") -> None:
        """DTensors are watched, where nothing is computed from them, because that has no squares; they have `.grad`."""
        places = [place for place in self._shards.places if id(place.whole) in watched.watched]
        watched.watched |= {id(place.dtensor): place.dtensor for place in places}
        own = {id(face): p.name for p in places for face in (p.part, p.whole, p.dtensor)}
        watched.names = own.copy
        watched.before_backward = self.before_backward

    def shape_of(self, p: Tensor) -> torch.Size:
        place = self._shards.of_part(p)
        return p.shape if place is None else place.shape

    def starts(self, parameters: Sequence[Tensor]) -> list[int] | None:
        """The place of each part's first number in the whole."""
        places = [self._shards.of_part(p) for p in parameters]
        return [0 if place is None else place.start(self.world.rank) for place in places]

    def mean_square(self, p: Tensor) -> float:
        """Over all parts; the same of a tensor that all ranks have."""
        sums = torch.stack(
            [p.detach().double().square().sum().cpu(), torch.tensor(float(p.numel())).double()]
        )
        self.world.add_(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    @torch.no_grad()
    def put_together(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of tensors as large as parts of parameters, the wholes, on all ranks. Those of wholes as they are."""
        places = [self._shards.of_part(p) for p in parameters]
        found = [
            t if place is None else t.new_empty(place.shape) for place, t in zip(places, tensors, strict=True)
        ]
        rows: list[list[Tensor]] = [[] for _ in range(self.world.size)]
        for place, whole, own in zip(places, found, tensors, strict=True):
            if place is None:
                continue
            for rank, row in enumerate(rows):
                first, count = place.rows[rank]
                if count:
                    row.append(whole[first : first + count])
            first, count = place.rows[self.world.rank]
            whole[first : first + count] = own
        self.world.exchange_(rows)
        return found

    @contextmanager
    def whole(self, optimizer: Sharded, names: frozenset[str] | None = None) -> Iterator[None]:
        """Parameters and state of all ranks put together, in the optimiser's own places."""
        if self._hooks:  # in a block, which is what its caller refuses
            yield
            return
        self._shards.follow()
        self.cut_state(optimizer)
        rows, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        wholes = self._wholes(rows, state, names)
        optimizer.state = defaultdict(dict, {wholes[p][0]: wholes[p][1] for p in wholes if wholes[p][1]})
        for group, row in zip(optimizer.param_groups, rows, strict=True):
            group["params"] = [wholes[p][0] for p in row]
        try:
            yield
        finally:
            found, optimizer.state = optimizer.state, state
            for group, row in zip(optimizer.param_groups, rows, strict=True):
                group["params"] = row
            for p, (own, _) in wholes.items():
                new = {name: v for name, v in found.get(own, {}).items() if name not in state.get(p, {})}
                if new:
                    state[p].update(new)
            self.cut_state(optimizer)

    def _wholes(
        self, rows: Sequence[Sequence[Tensor]], state: State, names: frozenset[str] | None
    ) -> dict[Tensor, tuple[nn.Parameter, dict[str, Any]]]:
        parameters = [p for row in rows for p in row]
        kept = {
            p: {name: v for name, v in state.get(p, {}).items() if names is None or name in names}
            for p in parameters
        }
        jobs = [(p, "", p.detach()) for p in parameters]
        jobs += [
            (p, name, kept[p][name])
            for p in parameters
            for name in sorted(kept[p])
            if _is_cut(name, kept[p][name])
        ]
        found = self.put_together([p for p, _, _ in jobs], [value for _, _, value in jobs])
        means: dict[Tensor, nn.Parameter] = {}
        for (p, name, _), value in zip(jobs, found, strict=True):
            if name:
                kept[p][name] = value
            else:
                means[p] = nn.Parameter(value, requires_grad=p.requires_grad)
        return {p: (means[p], kept[p]) for p in parameters}

    def cut_state(self, optimizer: Sharded) -> None:
        for p, values in optimizer.state.items():
            place = self._shards.of_part(p)
            if place is None:
                continue
            for name, value in values.items():
                if _is_cut(name, value) and value.shape != p.shape:
                    first, count = place.rows[self.world.rank]
                    values[name] = value[first : first + count].clone()

    def _device(self) -> torch.device:
        return self._shards.places[0].part.device


def refuse_with_shards(method: str, elementwise: bool, settings: Mapping[str, Any]) -> None:
    """What cannot be done with rows of parameters alone, or is not."""
    if not elementwise:
        raise UnsupportedOperation(
            f"{method} on the parameters of fully_shard (FSDP2): factors of a layer need all of its rows. Train the "
            "plain module with sharded=True, which gives each layer's factors to one rank (docs/distributed.md); or "
            "take VOGN, OGN, IVON or BayesByBackprop."
        )
    usual = {"vectorized": False, "mc_slices": 1, "mc_groups": None, "convolution_samples": None}
    for name, value in usual.items():
        if settings.get(name, value) != value:
            raise UnsupportedOperation(
                f"{name}={settings[name]!r} on the parameters of fully_shard (FSDP2), whose rows are gathered for one "
                f"sample at a time. Leave it out ({name}={value!r}); mc_samples=K takes K samples one after the other."
            )


def refuse_waiting(micro_batches: int, when: str = "is taken") -> None:
    """A state dict is whole, and the sums of micro-batches are of rows, or of what one rank has seen."""
    if micro_batches:
        raise CallOrderError(
            f"the state dict {when} while {micro_batches} micro-batches wait for the rest of their update. On the "
            "parameters of fully_shard (FSDP2) each rank has their sums for its own rows alone. Save after the "
            "update, where optimizer.pending() is 0."
        )


def _is_cut(name: str, value: Any) -> bool:
    """One number a weight; not the few numbers of a tensor, nor a counter."""
    return isinstance(value, Tensor) and value.dim() > 0 and name != "scale"


def _slice(place: ShardedParameter, rank: int) -> slice:
    begin = place.start(rank)
    return slice(begin, begin + place.rows[rank][1] * math.prod(place.shape[1:]))
