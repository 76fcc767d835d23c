"""State that is spread over the ranks: each keeps and updates its part.

Updates that go weight by weight are cut anywhere: the parameters of a group lie side by side in a row, each as it lies
in memory, and rank r has the r-th of P equal parts of the row. A step runs on parts of the parameters that stand in for
them, so that the update needs not know; then the ranks exchange their parts of the mean. What reads the state (a draw,
`posterior`, `state_dict`) has it put together before, and cut again after.

Kronecker layers are spread whole: each has an owner, who keeps and inverts its factors. The owner also has the layer's
momentum and prior, moves its mean, and draws its noise: for itself, and for each of the other ranks from that rank's
own stream, because a root is larger than the sample that is made of it. Parameters without factors are few and small;
every rank has all of theirs.
"""

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, final

import torch
from torch import Tensor

from credo.distributed.collect import gather
from credo.distributed.dividing import assign, cut
from credo.distributed.invert import invert_own, invert_together
from credo.distributed.reduce import add_up, gradients
from credo.distributed.whole import WholeParameters
from credo.distributed.world import ALONE, World
from credo.errors import CallOrderError, InvalidValue
from credo.kernels.tensors import flat, is_dense, reordered

if TYPE_CHECKING:
    from credo.optim.kronecker import KroneckerLayer
    from credo.optim.statistics import StepStatistics

State = defaultdict[Tensor, Any]  # torch's: what an optimiser keeps of each parameter
NOTHING = nullcontext()
# what samples are drawn with: variances, and where they are drawn around
WIDTHS = frozenset(("curvature", "log_variance", "prior_precision", "scale", "offset"))


T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class Sharded(Protocol):
    """An optimiser, as far as it matters here."""

    param_groups: list[dict[str, Any]]
    state: State
    settings: dict[str, Any]

    def names(self) -> dict[int, str]:
        """id of a parameter → its name."""


class Reducer(WholeParameters, ABC):
    """What one optimiser does together with the other ranks. In a world of one there is nothing to do.

    It adds up what the ranks have seen and, where the state is `sharded`, knows which part of it this rank has. Without
    `sharded` that is all of it.
    """

    def __init__(self, world: World, sharded: bool):
        self.world, self.alone, self.is_first = world, world.alone, world.rank == 0
        self.stream = world.rank << 48  # of this rank's draws: the numbers that begin so are its own
        self.sharded = sharded and not world.alone
        self.cuts: list[dict[int, slice]] = []  # [rank][id of a parameter], in a step whose sums are cut
        self.local_parts: dict[int, Tensor] = {}  # by the id of the parameter, in such a step

    # Sums

    def sum_(
        self,
        gathered: "StepStatistics",
        parameters: Sequence[Tensor],
        settings: Mapping[str, Any],
        counters: dict[str, int],
        loss: Tensor | None,
    ) -> Tensor | None:
        """Each rank's sums become those of the whole batch; the loss is then that of all examples."""
        at_once = gathered.vectorized or bool(settings.get("vectorized"))
        mean_loss = settings["reduction"] == "mean" or at_once
        counted = add_up(
            self,
            parameters,
            [gradients(parameters, mean_loss), *gathered.columns(parameters, mean_loss)],
            gathered.examples / max(gathered.samples, 1),
            None if loss is None else float(loss),
            mean_loss,
            counters,
        )
        gathered.vectorized, gathered.samples = at_once, 1 if at_once else settings["mc_samples"]
        gathered.examples = round(counted.examples * gathered.samples)
        counters["draws"] = counted.draws
        if counted.loss is None:
            return None
        return (parameters[0] if loss is None else loss).new_tensor(counted.loss)

    @final
    def largest(self, number: int) -> int:
        """The maximum over the ranks."""
        return self.world.largest(number)[0]

    @final
    def readers(self, groups: int | None) -> int:
        """How many ranks read the same data, where there are so many groups that do; None: each its own."""
        return int(self.world.size // (groups or self.world.size))

    @final
    def add_parts_(self, sums: Tensor) -> None:
        """Sums over parts of tensors become those over the whole ones."""
        if self.sharded:
            self.world.add_(sums)

    def __reduce__(self) -> tuple[type["Reducer"], tuple[World, bool]]:
        return type(self), (World(self.world.rank, self.world.size), self.sharded)

    @final
    def refuse_another_part(self, other: "Reducer") -> None:
        """A copy that has been taken to another world holds what is not its own there."""
        mine, theirs = (
            (s.world.rank, s.world.size) if s.sharded else (ALONE.rank, ALONE.size) for s in (self, other)
        )
        if mine != theirs:
            raise CallOrderError(
                f"this copy of an optimiser holds the state of rank {mine[0]} of {mine[1]}, and is rank {theirs[0]} "
                f"of {theirs[1]} now. Between different worlds go through state_dict(), which is whole."
            )

    @abstractmethod
    def all(self, mine: bool) -> bool:
        """Whether it is so for the sums of all ranks."""

    @abstractmethod
    def local_view(self, optimizer: "Sharded") -> AbstractContextManager[None]:
        """Around an update, which changes this rank's part only; then the ranks exchange their means."""

    @property
    @abstractmethod
    def must_catch_up(self) -> bool:
        """Whether the other ranks may have drawn samples together in this step while this one has not."""

    @abstractmethod
    def whole(
        self, optimizer: "Sharded", names: frozenset[str] | None = None
    ) -> AbstractContextManager[None]:
        """The state of all ranks put together; what appears in it is cut at the end. All ranks must come here."""

    @abstractmethod
    def cut_state(self, optimizer: "Sharded") -> None:
        """Keeps this rank's part of whatever is whole, because it was loaded, given, or has just been made."""


@final
class ElementReducer(Reducer):
    """For updates that go element by element."""

    def __init__(self, world: World, sharded: bool):
        super().__init__(world, sharded)
        self._kept: State | None = None  # the widths put together, until the last sample of a step is drawn
        self._draws = 0  # since the last step

    def all(self, mine: bool) -> bool:
        """Those that have everything know by themselves."""
        return self.world.all(mine) if self.sharded else mine

    # A step

    def local_view(self, optimizer: Sharded) -> AbstractContextManager[None]:
        return self._local_view(optimizer) if self.sharded else NOTHING

    @contextmanager
    def _local_view(self, optimizer: Sharded) -> Iterator[None]:
        """Each parameter, and what is kept of it, is this rank's part of it; then the ranks exchange their means."""
        self.cut_state(optimizer)
        rows, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        self.cuts = _cuts(optimizer, self.world.size)
        parts = {p: _part(p, self.cuts[self.world.rank]) for row in rows for p in row}
        self.local_parts = {id(p): part for p, part in parts.items()}
        optimizer.state = defaultdict(dict, {part: state[p] for p, part in parts.items() if p in state})
        for group, row in zip(optimizer.param_groups, rows, strict=True):
            group["params"] = [parts[p] for p in row]
        try:
            yield
            self.world.exchange_(_mean_parts([p for p in parts if p.requires_grad], self.cuts))
        finally:
            for group, row in zip(optimizer.param_groups, rows, strict=True):
                group["params"] = row
            state.update({p: optimizer.state[part] for p, part in parts.items() if part in optimizer.state})
            optimizer.state = state
            self.cuts, self.local_parts, self._kept, self._draws = [], {}, None, 0

    @property
    def must_catch_up(self) -> bool:
        """The widths are put together once, for the first sample."""
        return self.sharded and self._draws == 0

    # Reading

    @contextmanager
    def whole(self, optimizer: Sharded, names: frozenset[str] | None = None) -> Iterator[None]:
        if not self.sharded:
            yield
            return
        with self._reading(optimizer, self._put_together(optimizer, names)):
            yield

    def drawing(self, optimizer: Sharded) -> AbstractContextManager[None]:
        """The widths put together, once for all samples of a step, and forgotten after the last of them is drawn."""
        return self._drawing(optimizer) if self.sharded else NOTHING

    @contextmanager
    def _drawing(self, optimizer: Sharded) -> Iterator[None]:
        if self._kept is None:
            self._kept = self._put_together(optimizer, WIDTHS)
        with self._reading(optimizer, self._kept):
            yield
        self._draws += 1
        if self._draws >= blocks_a_step(optimizer.settings):
            self._kept = None

    @contextmanager
    def _reading(self, optimizer: Sharded, state: State) -> Iterator[None]:
        parts, optimizer.state = optimizer.state, state
        try:
            yield
        finally:
            optimizer.state = parts
            for p, values in state.items():
                new = {name: value for name, value in values.items() if name not in parts[p]}
                parts[p].update(new)
            self.cut_state(optimizer)

    def _put_together(self, optimizer: Sharded, names: frozenset[str] | None) -> State:
        self.cut_state(optimizer)
        cuts = _cuts(optimizer, self.world.size)
        parts: dict[Tensor, dict[str, Any]] = {
            p: {name: value for name, value in values.items() if names is None or name in names}
            for p, values in optimizer.state.items()
        }
        rows: list[list[Tensor]] = [[] for _ in cuts]
        for p in [p for group in optimizer.param_groups for p in group["params"] if p in parts]:
            for name in sorted(name for name, value in parts[p].items() if _is_cut(name, value, p)):
                part = parts[p][name]
                parts[p][name] = torch.empty_like(p.detach(), dtype=part.dtype)
                for row, own in zip(rows, cuts, strict=True):
                    row.append(flat(parts[p][name])[own[id(p)]])
                rows[self.world.rank][-1].copy_(part)
        self.world.exchange_(rows)
        return defaultdict(dict, parts)

    def cut_state(self, optimizer: Sharded) -> None:
        if not self.sharded:
            return
        own = _cuts(optimizer, self.world.size)[self.world.rank]
        for p, values in optimizer.state.items():
            for name, value in values.items():
                if _is_cut(name, value, p) and not _is_part(value, own[id(p)]):
                    values[name] = flat(reordered(value, p))[own[id(p)]].clone()


@final
class LayerReducer(Reducer):
    """`settings["owners"]` says by the name of a layer's weight who has it; the same on all ranks."""

    def __init__(self, world: World, sharded: bool):
        super().__init__(world, sharded)
        self.draws = 0  # of samples, since the last step

    def all(self, mine: bool) -> bool:
        """The sums are whole on every rank."""
        return mine

    def mine(self, optimizer: Sharded, name: str) -> bool:
        """Whether this rank has the layer of that weight; also as long as nobody owns it."""
        return not self.sharded or optimizer.settings["owners"].get(name, self.world.rank) == self.world.rank

    # A step

    @contextmanager
    def local_view(self, optimizer: Sharded) -> Iterator[None]:
        try:
            yield
            if self.sharded:
                self.world.exchange_(self.members(optimizer))
        finally:
            self.draws = 0

    @property
    def must_catch_up(self) -> bool:
        return self.sharded

    def streams(self, settings: Mapping[str, Any], number: int) -> list[int]:
        """Where the noise of a draw is, rank by rank."""
        shared = settings.get("shared_noise")
        return [number if shared else rank << 48 | number for rank in range(self.world.size)]

    def own_of(self, rows: Sequence[T]) -> T:
        """This rank's of rows with one for each."""
        return rows[self.world.rank]

    def swap_(self, given: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]]) -> None:
        """given[r] goes to rank r; taken[r] take what rank r has given."""
        self.world.swap_(given, taken)

    def invert(self, layers: "Sequence[KroneckerLayer]", form: str) -> None:
        """Refreshes the roots of layers: each rank those of its own layers, or its part of all, which all then have."""
        if self.alone:
            for layer in layers:
                layer.invert(form)
        elif self.sharded:
            invert_own(self.world, layers, form)
        else:
            invert_together(self.world, layers, form)

    def members(self, optimizer: Sharded) -> list[list[Tensor]]:
        """[rank] → the weights and biases of its layers, in the same order everywhere."""
        known, rows = _by_name(optimizer), [list[Tensor]() for _ in range(self.world.size)]
        for weight, bias in sorted(optimizer.settings["layers"].items()):
            row = rows[optimizer.settings["owners"][weight]]
            row += [known[name] for name in (weight, bias) if name is not None]
        return rows

    # Reading

    @contextmanager
    def whole(self, optimizer: Sharded, names: frozenset[str] | None = None) -> Iterator[None]:
        if not self.sharded:
            yield
            return
        known, own = _by_name(optimizer), self._own_state(optimizer)
        labels = [json.loads(text) for text in self.world.gather_texts(json.dumps(list(own)))]
        rows = gather(self.world, list(own.values()))
        for rank, (row, theirs) in enumerate(zip(rows, labels, strict=True)):
            for tensor, (name, kind) in zip(row, theirs, strict=True):
                if rank != self.world.rank:
                    optimizer.state[known[name]][kind] = tensor
        try:
            yield
        finally:
            self.cut_state(optimizer)

    def cut_state(self, optimizer: Sharded) -> None:
        """Layers that nobody owns, which are whole on every rank, find an owner; of others' layers nothing stays."""
        if self.sharded:
            self._assign(optimizer)
            known = _by_name(optimizer)
            for pair in optimizer.settings["layers"].items():
                for name in pair:
                    if name is not None and not self.mine(optimizer, pair[0]):
                        optimizer.state.pop(known[name], None)

    def _assign(self, optimizer: Sharded) -> None:
        """Old layers stay where their factors are; new ones go to the ranks that have least to do with those."""
        known, layers = _by_name(optimizer), optimizer.settings["layers"]
        costs = {weight: _cost(known[weight], bias is not None) for weight, bias in sorted(layers.items())}
        owners = {name: rank for name, rank in optimizer.settings["owners"].items() if name in layers}
        loads = [0.0] * self.world.size
        for name, rank in owners.items():
            loads[rank] += costs[name]
        new = [name for name in costs if name not in owners]
        found = assign([costs[name] for name in new], self.world.size, loads)
        optimizer.settings["owners"] = owners | dict(zip(new, found, strict=True))

    def _own_state(self, optimizer: Sharded) -> dict[tuple[str, str], Tensor]:
        """By name of the parameter and kind: what others do not have."""
        known, layers = _by_name(optimizer), optimizer.settings["layers"]
        mine = [pair for pair in layers.items() if self.mine(optimizer, pair[0])]
        names = [name for pair in mine for name in pair if name is not None]
        return {(name, kind): v for name in names for kind, v in optimizer.state.get(known[name], {}).items()}


def _cost(weight: Tensor, bias: bool) -> float:
    """About the work of inverting both factors, from what every rank knows of the layer."""
    rows = max(len(weight), 1)
    return float(rows**3 + (weight.numel() // rows + bias) ** 3)


def _by_name(optimizer: Sharded) -> dict[str, Tensor]:
    names = optimizer.names()
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def blocks_a_step(settings: Mapping[str, Any]) -> int:
    """One for each sample; all samples may be computed at once, or those that share the noise of convolutions."""
    if not settings.get("vectorized"):
        return int(settings["mc_samples"])
    return settings.get("convolution_samples") or 1


def gathered(names: frozenset[str] | None = None) -> Callable[[Method], Method]:
    """For methods that read the state: with sharded=True it is put together for them, and all ranks must call them."""

    def decorated(method: Method) -> Method:
        @wraps(method)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._reducer.whole(self, names):
                return method(self, *args, **kwargs)

        return cast(Method, read)

    return decorated


def _cuts(optimizer: Sharded, parts: int) -> list[dict[int, slice]]:
    """[part][id of a parameter], each group's row cut by itself: a group that joins does not move the others."""
    found: list[dict[int, slice]] = [{} for _ in range(parts)]
    for group in optimizer.param_groups:
        for own, slices in zip(found, cut(tuple(p.numel() for p in group["params"]), parts), strict=True):
            own.update(zip(map(id, group["params"]), slices, strict=True))
    return found


def _part(p: Tensor, own: Mapping[int, slice]) -> Tensor:
    """Its elements themselves, not a copy."""
    if not is_dense(p):
        raise InvalidValue(
            f"sharded=True cuts parameters as they lie in memory, and one of shape {tuple(p.shape)} has gaps there "
            f"(its strides are {p.stride()}). Give its module a contiguous copy."
        )
    return flat(p.detach())[own[id(p)]].requires_grad_(p.requires_grad)


def _mean_parts(parameters: Sequence[Tensor], cuts: Sequence[Mapping[int, slice]]) -> list[list[Tensor]]:
    return [[flat(p.detach())[own[id(p)]] for p in parameters if _length(own[id(p)])] for own in cuts]


def _is_cut(name: str, value: Any, p: Tensor) -> bool:
    """One number a weight; not a counter, of which each parameter has one."""
    if not isinstance(value, Tensor) or name == "scale" or name.rpartition(".")[2] == "step":
        return False
    return value.dim() > 0 or p.dim() == 0


def _is_part(value: Tensor, own: slice) -> bool:
    """Parts are rows, and shorter than the row of all elements, unless they are that."""
    return value.dim() == 1 and len(value) == _length(own)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
