"""State that is spread over the ranks: each keeps and updates its part.

Updates that go weight by weight are cut anywhere: the parameters of a group lie side by side in a row, each as it lies
in memory, and rank r has the r-th of P equal parts of the row. A step runs on parts of the parameters that stand in for
them, so that the update needs not know; then the ranks exchange their parts of the mean. What reads the state (a draw,
`posterior`, `state_dict`) has it put together before, and cut again after. Kronecker layers are in `layer_shards`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar, cast, final

import torch
from torch import Tensor

from credo.distributed import ALONE, World
from credo.distributed.dividing import cut
from credo.errors import CallOrderError, InvalidValue
from credo.kernels.tensors import flat, is_dense, reordered

State = defaultdict[Tensor, Any]  # torch's: what an optimiser keeps of each parameter
NOTHING = nullcontext()
# what samples are drawn with: variances, and where they are drawn around
WIDTHS = frozenset(("curvature", "log_variance", "prior_precision", "scale", "offset"))


Method = TypeVar("Method", bound=Callable[..., Any])


class Sharded(Protocol):
    """An optimiser, as far as it matters here."""

    param_groups: list[dict[str, Any]]
    state: State
    settings: dict[str, Any]

    def names(self) -> dict[int, str]:
        """id of a parameter → its name."""


class Shards(ABC):
    """Which part of the state this rank has. Without `sharded` all of it, and every method does nothing."""

    def __init__(self, everybody: World, sharded: bool):
        self.world = everybody
        self.sharded = sharded and not everybody.alone
        self.cuts: list[dict[int, slice]] = []  # [rank][id of a parameter], in a step whose sums are cut
        self.stand_ins: dict[int, Tensor] = {}  # by the id of the parameter, in such a step

    @final
    def __reduce__(self) -> tuple[type["Shards"], tuple[World, bool]]:
        return type(self), (World(self.world.rank, self.world.size), self.sharded)

    @final
    def refuse_another_part(self, other: "Shards") -> None:
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
    def standing_in(self, optimizer: "Sharded") -> AbstractContextManager[None]:
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
class ElementShards(Shards):
    """For updates that go element by element."""

    def __init__(self, everybody: World, sharded: bool):
        super().__init__(everybody, sharded)
        self._kept: State | None = None  # the widths put together, until the last sample of a step is drawn
        self._draws = 0  # since the last step

    def all(self, mine: bool) -> bool:
        """Those that have everything know by themselves."""
        return self.world.all(mine) if self.sharded else mine

    # A step

    def standing_in(self, optimizer: Sharded) -> AbstractContextManager[None]:
        return self._standing_in(optimizer) if self.sharded else NOTHING

    @contextmanager
    def _standing_in(self, optimizer: Sharded) -> Iterator[None]:
        """Each parameter, and what is kept of it, is this rank's part of it; then the ranks exchange their means."""
        self.cut_state(optimizer)
        rows, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        self.cuts = _cuts(optimizer, self.world.size)
        parts = {p: _part(p, self.cuts[self.world.rank]) for row in rows for p in row}
        self.stand_ins = {id(p): part for p, part in parts.items()}
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
            self.cuts, self.stand_ins, self._kept, self._draws = [], {}, None, 0

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


def blocks_a_step(settings: Mapping[str, Any]) -> int:
    """One for each sample; all samples may be computed at once, or those that share the noise of convolutions."""
    if not settings.get("vectorized"):
        return int(settings["mc_samples"])
    return settings.get("convolution_samples") or 1


def whole(names: frozenset[str] | None = None) -> Callable[[Method], Method]:
    """For methods that read the state: with sharded=True it is put together for them, and all ranks must call them."""

    def decorated(method: Method) -> Method:
        @wraps(method)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._shards.whole(self, names):
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
