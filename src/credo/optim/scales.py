"""What each tensor is updated with: its numbers, by the rule of `relative`, and its state as lists for the kernels."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from credo.distributed.sharding import WIDTHS, ElementReducer, gathered
from credo.errors import InvalidValue
from credo.kernels.flags import norms_of, read
from credo.kernels.tensors import MeanBackup, TensorList
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import ParameterSummary, Part, part_of
from credo.optim.groups import refuse_other_sizes
from credo.optim.relative import (
    FOLLOWED,
    NOTHING,
    SMALLEST_SQUARE,
    TINY,
    USUAL_SIZE,
    TensorNumbers,
    check_relative,
    own_options,
    take_absolute,
)
from credo.optim.statistics import StepStatistics

Averaged = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
# v, h̄, a and u of one tensor, in float64 and main memory; a is 0 before the first gradient, states of old have no u.
Scale = Tensor


def is_relative(group: Mapping[str, Any]) -> bool:
    """Whether a number of this group depends on the tensor."""
    return (
        group["relative_lr"]
        or group.get("relative_damping", False)
        or group["noise"] is not None
        or group["prior_precision"] is None
    )


def numbers(
    group: Mapping[str, Any], scales: Sequence[Sequence[float] | None], data_size: float, growth: float
) -> TensorNumbers:
    """α, γ, τ and δ of tensors in a group, a list of each: as given, or by the rule from the tensor's v, h̄, a, u."""
    given = float(group["lr"]), float(group.get("damping", 0.0)), float(group["tempering"])
    relative_lr, relative_damping = group["relative_lr"], group.get("relative_damping")
    noise, prior = group["noise"], group["prior_precision"]
    found = TensorNumbers([], [], [], [])
    for scale in scales:
        lr, damping, tempering, precision = *given, prior
        if scale is not None:  # else of a group without relative numbers
            square, curvature, alignment = scale[:3]
            if relative_damping:
                damping *= curvature
            if relative_lr:
                usual = scale[-1] if len(scale) > 3 else square
                lr *= math.sqrt(usual / curvature) * (curvature + damping) / alignment if alignment else 0.0
            if noise is not None:
                kappa = noise * growth
                tempering *= min(1.0, kappa**2 * square * data_size * (curvature + damping))
            precision = 1 / square if prior is None else prior
        for column, number in zip(found, (lr, damping, tempering, precision), strict=True):
            column.append(number)
    return found


# ────────────────────────────────────────
# What is followed of a tensor.


def measure(weight: Tensor, curvature: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Sums of squares of the weights and the gradient, the sum of the curvature: three numbers, for `scale_of`."""
    zero = weight.new_zeros((), dtype=torch.float64)
    squares = zero if gradient is None else gradient.double().square().sum()
    return torch.stack([weight.detach().double().square().sum(), curvature.double().sum(), squares])


def scale_of(sums: Tensor, weights: int, shape: torch.Size) -> Scale:
    """From `measure` of a tensor of this shape, or the sum of it over its parts, with so many weights."""
    square, curvature, gradient = (max(number, 0.0) / max(weights, 1) for number in sums.tolist())
    mean = max(curvature, TINY)
    alignment = min(max(math.sqrt(gradient / mean), 1e-3), 1e3) if gradient else 0.0
    v = size_of(square, len(shape) > 1)
    return torch.tensor([v, mean, alignment, usual_square(v, shape)], dtype=torch.float64)


def start_scale(weight: Tensor, square: float, curvature: float = 1.0) -> Scale:
    """Of a tensor that has not seen data: any curvature will do, because the noise is relative to the weights.

    `square` is the mean square of the weights.
    """
    v = size_of(square, weight.dim() > 1)
    return torch.tensor([v, curvature, 0.0, usual_square(v, weight.shape)], dtype=torch.float64)


def size_of(square: float, matrix: bool) -> float:
    """v from the mean square. A matrix has the size it has unless it starts at zero; vectors, which may start small and
    have to grow, have at least that of a weight of 0.01."""
    return square if matrix and square > NOTHING else max(square, SMALLEST_SQUARE)


def usual_square(square: float, shape: torch.Size) -> float:
    """u from v: at least about what torch gives a layer with as many inputs, 1/(3·inputs)."""
    return max(square, USUAL_SIZE / (3 * max(shape[1:].numel(), 1))) if len(shape) > 1 else square


def measure_curvature(scale: Scale, curvature: float) -> None:
    """h̄ is new, and a·√h̄ as before."""
    mean = max(curvature, TINY)
    scale[2] *= math.sqrt(float(scale[1]) / mean)
    scale[1] = mean


def follow_growth_(scale: Scale, mean_square: float) -> None:
    """a·√h̄ follows rms(ĝ): at once where it grows, slowly where it falls. For curvatures that are refreshed rarely."""
    known = float(scale[2]) ** 2 * float(scale[1])
    following = max(mean_square, known + FOLLOWED * (mean_square - known), TINY)
    scale[2] = math.sqrt(following / float(scale[1]))


def follow_gradient_(scale: Scale, step: int, mean_square: float, examples: float | None) -> None:
    """Without per-example gradients: a·√h̄ follows rms(ĝ), and h̄, if `examples` are given, twice the mean of M·ĝ²."""
    curvature, alignment = scale[1:3].tolist()
    known = alignment**2 * curvature
    following = mean_square if step == 1 else known + FOLLOWED * (mean_square - known)
    if examples is not None:
        scale[1] = curvature = curvature * (1 - 1 / step) + 2 * examples * mean_square / step
    scale[2] = math.sqrt(following / curvature)


# ────────────────────────────────────────


class RelativeOptimizer(BayesianOptimizer):
    """An optimiser whose numbers follow each tensor, as far as they were not given."""

    # Of gradients on accelerators in this step, by the parameter's id.
    _norms: Mapping[int, float] = MappingProxyType({})

    @final
    def _growth(self) -> float:
        """What the noise of the default rule is multiplied by; under an error of unknown scale it stays as it is."""
        return self._progress.growth if self.counters.get("likelihood") else 1.0

    @final
    def _start_scale(self, p: Tensor, curvature: float = 1.0) -> Scale:
        return start_scale(p, self._reducer.mean_square(p), curvature)

    @final
    def _numbers(self, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> TensorNumbers:
        """α, γ, τ and δ of each tensor with these states."""
        known = is_relative(group)
        scales = [own[SCALE].tolist() if known else None for own in states]
        return numbers(group, scales, self._effective_size(), self._growth())

    @final
    def _numbers_of(self, group: Mapping[str, Any], p: Tensor) -> TensorNumbers:
        """α, γ, τ and δ of one parameter, which may not have seen data yet."""
        scale = None
        if is_relative(group):
            known = self.state[p].get(SCALE)
            scale = (self._start_scale(p) if known is None else known).tolist()
        own = numbers(group, [scale], self._effective_size(), self._growth())
        return TensorNumbers(own.lr[0], own.damping[0], own.tempering[0], own.prior_precision[0])

    def _shrinkages(
        self, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]], own: TensorNumbers
    ) -> list[float] | list[Tensor]:
        """δ̃ = τδ/N of each tensor: a number, or under a posterior as prior one a weight; none for normalisation."""
        if group["deterministic"]:
            return [0.0] * len(own.lr)
        size = self._effective_size()
        precisions = [state["prior_precision"] for state in states if "prior_precision" in state]
        if precisions:
            return list(torch._foreach_mul(precisions, [tempering / size for tempering in own.tempering]))
        pairs = zip(own.tempering, own.prior_precision, strict=True)
        return [tempering * precision / size for tempering, precision in pairs]

    @final
    def _shrinkage(self, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ of one parameter."""
        if group["deterministic"]:
            return 0.0
        own = self._numbers_of(group, p)
        precision: float | Tensor = self.state[p].get("prior_precision", own.prior_precision)
        unit: float = own.tempering / self._effective_size()
        return precision * unit

    @final
    def _ask_for_norms(self, gathered: StepStatistics, parameters: Sequence[Tensor]) -> None:
        """Those of gradients on accelerators are read with the check of a step, and in `_norms` then."""
        away = [p for p in parameters if p.grad is not None and not p.grad.is_cpu and p.numel()]
        found = dict[int, float]()
        self._norms = found

        def take(place: int, norm: float) -> None:
            found[id(away[place])] = norm

        gathered.ask([p.grad for p in away if p.grad is not None], norms_of, take)

    @final
    def _read_norms(self, reached: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Any]:
        """Of the gradients of parameters, some of which are on accelerators."""
        known = self._norms
        return [known[id(p)] if id(p) in known else gradient.norm() for p, gradient in reached]

    @final
    def _ask_for_means(self, states: Sequence[dict[str, Tensor]], gathered: StepStatistics) -> None:
        """Follows the mean curvatures of tensors, which are read with the rest of the step."""

        def take(place: int, total: float) -> None:
            states[place][SCALE][1] = max(total / states[place]["curvature"].numel(), TINY)

        gathered.ask([own["curvature"] for own in states], partial(norms_of, order=1.0), take)

    def _effective_size(self) -> float:
        return float(self.settings["data_size"] * self.settings["augmentation"])

    @final
    def _list(self, group: Mapping[str, Any], name: str, tensors: Sequence[Tensor]) -> TensorList:
        """For the kernels, which look at tensors once, as long as nothing about them changes."""
        known = self._lists.get((id(group), name))
        if known is not None and len(known) == len(tensors) and all(map(is_, known, tensors)):
            return known
        found = TensorList(tensors, self._reducer.starts(tensors) if self._reducer.sharded else None)
        if tensors:
            present = set(map(id, self.param_groups))
            self._lists = {key: own for key, own in self._lists.items() if key[0] in present}
            if not self._reducer.sharded:  # sharded, whole states are there for a moment only
                self._lists[id(group), name] = found
        return found


class DampedOptimizer(RelativeOptimizer):
    """With a damping γ beside the prior, both of which may follow each tensor."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; an lr, damping or tempering that a group brings is absolute, not relative to its tensors."""
        super().add_param_group(own_options(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        take_absolute(self.param_groups)

    @final
    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        if "momentum" in group:
            arguments.number("momentum", group["momentum"], 0, 1, open_high=True)
        arguments.number("ema_rate", group["ema_rate"], 0, 1, open_low=True)
        arguments.number("damping", group["damping"], 0, math.inf)
        check_relative(group)
        without_prior = group["deterministic"] or group["prior_precision"] == 0
        starts = [self.settings.get(name) for name in ("initial_curvature", "initial_precision")]
        if without_prior and group["damping"] == 0 and starts == [None, None]:
            raise InvalidValue(
                "zero precision: damping=0 with prior_precision=0 (normalisation layers have no prior) leaves nothing "
                "where the curvature is zero: an improper posterior. Give damping > 0."
            )


class GroupRows(NamedTuple):
    """The parameters of one group with what is kept of each, as lists for the kernels."""

    group: dict[str, Any]
    parameters: TensorList
    states: list[dict[str, Tensor]]
    lists: dict[str, TensorList | None]  # what the states have by a name; None where not all of them have it
    numbers: TensorNumbers  # α, γ, τ and δ of each
    priors: list[float] | list[Tensor]  # δ̃
    places: range  # of those with noise, among all of them
    scale: list[float]  # τ/N, of those with noise
    shift: list[float] | list[Tensor]  # δ̃ + γ, of those with noise
    relative: bool
    complete: bool  # whether all lists are there, and what the numbers depend on


class DiagonalOptimizer(RelativeOptimizer):
    """`state[p]` has a "curvature" as large as the parameter: σ² = τ / (N(curvature + δ̃ + γ))."""

    _reducer: ElementReducer

    def _moved_state(self, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device."""
        state: dict[str, Tensor] = self.state[p]
        for key, value in state.items():
            state[key] = value if key == SCALE else value.to(p.device)
        return state

    def _has_moved(self, p: Tensor, curvature: Tensor) -> bool:
        """Whether what is kept of a parameter has to follow it."""
        return curvature.device != p.device

    @final
    def _rows(self, *names: str, reached: Collection[int] | None = None) -> list[GroupRows]:
        """Group by group, with what the states have by these names.

        Without `reached` what a draw changes: parameters with noise, and those that are moved to their iterates. Else
        those of these ids that have a gradient.
        """
        found, first = [], 0
        for group in self.param_groups:
            noisy = reached is None and self._trains_with_noise and not group["deterministic"]
            needed = None if reached is not None else "curvature" if noisy else "offset"
            states = self._states(group, needed, reached)
            if not states:
                continue
            rows = list(states.values())
            places = range(first, first + len(rows) if noisy else first)
            first = places.stop
            found.append(self._rows_of(group, states, rows, names, places))
        return found

    def _states(
        self, group: Mapping[str, Any], needed: str | None, reached: Collection[int] | None
    ) -> dict[Tensor, dict[str, Tensor]]:
        """The trainable parameters of a group in order, with their state; only those that have what is `needed`."""
        found = {}
        for p in group["params"]:
            if p.requires_grad and (reached is None or (p.grad is not None and id(p) in reached)):
                own = self.state[p]
                known = own.get("curvature")
                if known is None or self._has_moved(p, known):
                    own = self._moved_state(group, p)
                if needed is None or needed in own:
                    found[p] = own
        return found

    def _rows_of(
        self,
        group: dict[str, Any],
        states: Mapping[Tensor, dict[str, Tensor]],
        rows: list[dict[str, Tensor]],
        names: Sequence[str],
        places: range,
    ) -> GroupRows:
        parameters = self._list(group, "mean", list(states))
        sizes, lists = list(map(Tensor.numel, parameters)), dict[str, TensorList | None]()
        for name in names:
            row = [state[name] for state in rows if name in state]
            lists[name] = self._list(group, name, row) if len(row) == len(rows) else None
            if row and list(map(Tensor.numel, row)) != sizes[: len(row)]:
                for p, state in states.items():
                    refuse_other_sizes(group, p, state)
        relative, size = is_relative(group), self._effective_size()
        scales = [state[SCALE].tolist() if relative and SCALE in state else None for state in rows]
        own = numbers(group, scales, size, self._growth())
        known = not relative or None not in scales
        priors = self._shrinkages(group, rows, own) if known else []
        scale, shift = list[float](), cast("list[Any]", priors)
        if places:
            scale = [tempering / size for tempering in own.tempering]
            if isinstance(priors[0], Tensor):
                shift = list(torch._foreach_add(shift, own.damping))
            else:
                shift = [prior + gamma for prior, gamma in zip(shift, own.damping, strict=True)]
        aligned = known and not (
            relative and 0.0 in [known_scale[2] for known_scale in scales if known_scale]
        )
        complete = aligned and None not in (lists["curvature"], lists.get("momentum", parameters))
        return GroupRows(
            group, parameters, rows, lists, own, priors, places, scale, shift, relative, complete
        )

    def _catch_up(self) -> None:
        self._drawn()

    @final
    def _drawn(self) -> list[GroupRows]:
        """What a draw changes; ranks that have parts of it put them together here."""
        if not self._reducer.sharded:
            return self._rows("curvature", "offset")
        with self._reducer.drawing(self):
            for p in (p for group in self.param_groups if is_relative(group) for p in group["params"]):
                if SCALE not in self.state[p]:  # now that it is whole
                    self.state[p][SCALE] = self._start_scale(p)
            return self._rows("curvature", "offset")

    # The numbers of parameters

    @final
    def beliefs(self) -> Iterator[ParameterSummary]:
        """Every trainable parameter with what is known of it, in order."""
        names = self.names()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                state, own = self._moved_state(group, p), self._numbers_of(group, p)
                if "prior_precision" in state:
                    own = own._replace(prior_precision=math.nan)
                rest = own, self.data_size, group["deterministic"]
                yield ParameterSummary(
                    names[id(p)], p, state.get("curvature"), self._shrinkage(group, p), *rest
                )

    @final
    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members = set(map(id, group["params"]))
        return [part_of(b) for b in self.beliefs() if id(b.parameter) in members]

    def _set_scales(
        self,
        states: Sequence[dict[str, Any]],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
    ) -> None:
        """Measures tensors anew, or for the first time, with gradients; with parts of them, over all ranks."""
        rows = []
        for k, (own, p) in enumerate(zip(states, parameters, strict=True)):
            rows.append(measure(p, own["curvature"], None if gradients is None else gradients[k]))
        sums = torch.tensor(read(rows), dtype=torch.float64)
        sizes = torch.tensor([[float(p.numel())] for p in parameters], dtype=torch.float64)
        both = torch.cat([sums, sizes], 1)
        self._reducer.add_parts_(both)
        counts = both[:, 3].tolist()
        for own, p, row, size in zip(states, parameters, both[:, :3], counts, strict=True):
            new = scale_of(row, round(size), p.shape)
            if (known := own.get(SCALE)) is not None:
                new[0], new[2], new[3] = known[0], new[2] or known[2], known[-1 if len(known) > 3 else 0]
            own[SCALE] = new

    def _measure_together(self, groups: Sequence[GroupRows]) -> None:
        """Follows the mean curvature of tensors that lie on several ranks in parts."""
        if relative := [rows for rows in groups if rows.relative]:
            parameters = [p for rows in relative for p in rows.parameters]
            self._set_scales([own for rows in relative for own in rows.states], parameters, None)

    @final
    @gathered(WIDTHS)
    def curvature(self) -> dict[str, Tensor]:
        """The curvature by name, such as the running mean of squared per-example gradients; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}


# ────────────────────────────────────────
# Means that are averages of iterates.
#
# An update moves an iterate z, samples are drawn around it, and the mean follows it:
#
#     μ ← μ + w(z − μ),   w = (η + 1)/(t + η)          at step t
#
# The mean is then over the last 1/(η + 1) of all steps or so, recent ones weighing more, with no end to plan for. It
# does what a falling learning rate does: the noise of single steps is averaged out. What is kept beside a parameter,
# which holds μ, is the offset z − μ.


def averaged(mean: Tensor, iterate: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """The mean that has followed an iterate, and the offset that is left."""
    offset = iterate - mean
    step = weight * offset
    return mean + step, offset - step


def of_averages(update: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Averaged:
    """An update of (μ, m, s) as one of (μ, m, s, z − μ), which moves the iterate z; without z − μ the mean itself."""

    def averaged_update(
        mean: Tensor, *others: Any, weight: float, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *given, offset = others  # m, s, what the step brings, and z − μ last
        iterate, momentum, curvature = update(mean if offset is None else mean + offset, *given, **options)
        if offset is None:
            return iterate, momentum, curvature, None
        mean, offset = averaged(mean, iterate, weight)
        return mean, momentum, curvature, offset

    return averaged_update


@torch.no_grad()
def place_iterates(backup: MeanBackup, parameters: TensorList, offsets: Sequence[Tensor]) -> None:
    """Parameters become their iterates z = μ + offset; their means are put away."""
    if not parameters:
        return
    away = backup.taken(parameters) or backup.keep(parameters)
    iterates = torch._foreach_add(list(away.places), list(offsets))
    torch._foreach_copy_([p.detach() for p in parameters], iterates)
