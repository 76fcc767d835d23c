"""The online Gauss–Newton update that VOGN and OGN share: a running mean of squared per-example gradients.

With N the data size times ρ, δ̃ = τδ/N, and gᵢ the gradient of example i's loss:

    ĝ = mean of gᵢ,  ĥ = mean of gᵢ²          over K samples and M examples, element by element
    m ← β₁·m + ĝ + δ̃(μ − μ₀)
    s ← (1 − β₂)·s + β₂·ĥ
    μ ← μ − α·m / (s + δ̃ + γ)
    σ² = τ / (N(s + δ̃ + γ))

At its fixed point the precision 1/σ² is N·h/τ + δ (γ aside). The first squares are the first s. The paper's
Algorithm 1 is this at τ = 1; for other τ its precision tends to N·h/τ + τδ, which is a misprint.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.errors import InvalidValue
from credo.kernels import update
from credo.kernels.lists import Numbers as ListNumbers
from credo.kernels.lists import each, is_number
from credo.optim import arguments
from credo.optim.beliefs import Belief
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import Part, part_of
from credo.optim.gathering import Gathered, GatheredSquares
from credo.optim.iterates import Moved, weight
from credo.optim.plan import Plan, Ready, averages, ready_rows, refuse_other_sizes
from credo.optim.priors import take_prior
from credo.optim.relative import (
    TINY,
    Given,
    TensorNumbers,
    averaging_of,
    check_relative,
    divided,
    is_relative,
    measure,
    numbers,
    own_options,
    products,
    scale_of,
    share_noise,
    start_scale,
    take_absolute,
)
from credo.optim.shards import WIDTHS, whole
from credo.optim.squares import SquaresOptimizer
from credo.posterior import DiagonalPosterior, Posterior

FIRST_STEPS, EVERY = 20, 5  # how often mean curvatures are measured: every step at first, then every fifth


class Uncertain(NamedTuple):
    """The parameters of one group that have a width, and which among all of them they are."""

    plan: Plan
    widths: tuple[
        list[Tensor], ListNumbers, ListNumbers | list[Tensor]
    ]  # s, τ/N and δ̃ + γ, of which σ² is made
    places: range


class Drawn(NamedTuple):
    """What a block changes: parameters with noise, and those that are moved from their means to their iterates."""

    noisy: list[Uncertain]
    moved: Moved


class GaussNewton(SquaresOptimizer):
    """The state and the update; whether a block holds a sample or the mean is left to the method."""

    _updates_from_origins = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None,
        *,
        data_size: float,
        momentum: float,
        ema_rate: float,
        prior_precision: float | None,
        prior: Posterior | None,
        damping: float | None,
        tempering: float | None,
        averaging: float | None,
        mc_samples: int,
        mc_slices: int,
        vectorized: bool,
        augmentation: float,
        initial_curvature: float | None,
        initial_precision: float | None,
        reduction: str,
        seed: int,
        shared_noise: bool,
        sharded: bool,
        mc_groups: int | None,
    ):
        size = arguments.whole("data_size", data_size, 1)
        rho = arguments.number("augmentation", augmentation, 1, math.inf)
        given = Given(lr, damping, tempering, prior_precision, initial_precision is not None)
        defaults = {
            **given.options(),  # α, γ, τ, δ, and which of them are relative to the tensor
            "momentum": momentum,  # β₁
            "ema_rate": ema_rate,  # β₂
            "deterministic": False,
        }
        settings = {
            "data_size": size,  # N
            "augmentation": rho,  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "mc_slices": arguments.whole("mc_slices", mc_slices, 1),
            "vectorized": bool(vectorized),
            "initial_curvature": initial_curvature,  # s₀
            "initial_precision": initial_precision,  # P
            "averaging": averaging_of(averaging, lr),  # η
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
            "mc_groups": arguments.groups_of_ranks(mc_groups),
        }
        if vectorized and mc_slices > 1:
            raise InvalidValue(f"vectorized=True and mc_slices={mc_slices} exclude each other. Choose one.")
        _check_start(initial_curvature, initial_precision)
        super().__init__(params, defaults, settings)
        share_noise(self.param_groups, self.defaults)
        self.counters["likelihood"] = 0
        if prior is not None:
            take_prior(self, prior)

    @final
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; an lr, damping or tempering that a group brings is absolute, not relative to its tensors."""
        super().add_param_group(own_options(param_group))

    @final
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        take_absolute(self.param_groups)

    @final
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes exactly; refuses the state of another model or method, and then has changed nothing."""
        super().load_state_dict(state_dict)
        if "averaging" not in state_dict["credo"]["settings"]:  # saved before there was an average
            self.settings["averaging"] = 0.0

    @final
    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        arguments.number("momentum", group["momentum"], 0, 1, open_high=True)
        arguments.number("ema_rate", group["ema_rate"], 0, 1, open_low=True)
        arguments.number("damping", group["damping"], 0, math.inf)
        check_relative(group)
        without_prior = group["deterministic"] or group["prior_precision"] == 0
        first_squares = (
            self.settings["initial_curvature"] is None and self.settings["initial_precision"] is None
        )
        if without_prior and group["damping"] == 0 and first_squares:
            raise InvalidValue(
                "zero precision: damping=0 with prior_precision=0 (normalisation layers have no prior) leaves nothing "
                "where the squared gradients are zero: an improper posterior. Give damping > 0."
            )

    @final
    def _update(
        self, gathered: Gathered, gradient_scale: float, squares_scale: float, loss: Tensor | None
    ) -> bool:
        assert isinstance(gathered, GatheredSquares)
        ready = []
        for group in self.param_groups:
            if found := ready_rows(group, self._plan(group), gathered.squares):
                ready.append(found)
        check = len(ready) == 1 and self._sole(ready[0], gathered, loss)
        if not check and not self._finite(gathered, loss):
            return False
        mean_loss = self.settings["reduction"] == "mean" or gathered.vectorized
        per_example = 1 if mean_loss else gathered.examples / gathered.samples
        gradient_unit = 1 / (gathered.samples * per_example * gradient_scale)
        squares_unit = gathered.unit / (gathered.samples * squares_scale**2)
        if self.counters["step"] == 0:
            self.counters["likelihood"] = self._world.largest(int(gathered.likelihood))[0]
        self._begin(ready, gradient_unit, squares_unit)
        if gathered.supplied:  # at the parameters, which are the iterates then
            for offset in (own["offset"] for one in ready for own in one.states if "offset" in own):
                offset.zero_()
        if not all(self._update_group(one, gradient_unit, squares_unit, check) for one in ready):
            return False
        self._count_examples(gathered)
        if self._follows(self.counters["step"]):
            self._measure(ready)
        return True

    def _follows(self, step: int) -> bool:
        """Whether the mean curvatures are measured after this step: it is a mean over the last ten or so."""
        return step < FIRST_STEPS or step % EVERY == 0

    def _begin(self, ready: Sequence[Ready], gradient_unit: float, squares_unit: float) -> None:
        """State for parameters at their first gradient."""
        new = []
        for one in ready:
            if one.plan is None:
                one.begin(squares_unit, bool(self.settings["averaging"]) and averages(one.group))
            if is_relative(one.group):
                missing = [k for k, own in enumerate(one.states) if SCALE not in own or not own[SCALE][2]]
                new += [(one, k) for k in missing]
        if new:
            self._set_scales(
                [one.states[k] for one, k in new],
                [one.parameters[k] for one, k in new],
                [one.gradients[k] * gradient_unit for one, k in new],
            )

    def _measure(self, ready: Sequence[Ready]) -> None:
        """Follows the mean curvature of each tensor whose numbers depend on it."""
        states = [own for one in ready if is_relative(one.group) for own in one.states]
        parameters = [p for one in ready if is_relative(one.group) for p in one.parameters]
        if not states:
            return
        if self._shards.sharded:
            self._set_scales(states, parameters, None)
            return
        for own in states:
            own[SCALE][1] = max(float(own["curvature"].mean()), TINY)

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
        sums = torch.stack([row.cpu() for row in rows])
        sizes = torch.tensor([[float(p.numel())] for p in parameters], dtype=torch.float64)
        if self._shards.sharded:
            both = torch.cat([sums, sizes], 1)
            self._world.add_(both)
            sums, sizes = both[:, :3], both[:, 3:]
        counts = sizes.flatten().tolist()
        for own, p, row, size in zip(states, parameters, sums, counts, strict=True):
            new = scale_of(row, round(size), p.dim() > 1)
            if (known := own.get(SCALE)) is not None:
                new[0], new[2] = known[0], new[2] or known[2]
            own[SCALE] = new

    def _sole(self, ready: Ready, gathered: GatheredSquares, loss: Tensor | None) -> bool:
        """Whether all other numbers of the step are finite for sure; the kernel looks at these on its way."""
        return (
            ready.plan is not None
            and ready.plan.keeps
            and len(self.param_groups) == 1
            and len(gathered.squares) == len(ready.parameters)
            and not self._shards.sharded
            and (loss is None or math.isfinite(loss))
        )

    def _update_group(self, ready: Ready, gradient_unit: float, squares_unit: float, check: bool) -> bool:
        group, parameters = ready.group, ready.parameters
        own = self._numbers(group, ready.states)
        mean_weight = weight(self.settings["averaging"], self.counters["step"])
        numbers = update.Settings(
            own.lr,
            group["momentum"],
            group["ema_rate"],
            own.damping,
            gradient_unit,
            squares_unit,
            mean_weight,
        )
        prior, origins = self._shrinkages(group, ready.states, own), self._keeper.kept(parameters)
        updater = None if ready.plan is None else ready.plan.updater(origins)
        if updater is not None and is_number(prior):
            done = updater(ready.gradients, ready.squares, prior, numbers, origins, check)
        else:
            done = update.vogn_all_(
                parameters,
                ready.row("momentum"),
                ready.row("curvature"),
                ready.gradients,
                ready.squares,
                prior,
                ready.row("prior_mean") if "prior_mean" in ready.states[0] else None,
                numbers,
                origins,
                check,
                ready.row("offset") if "offset" in ready.states[0] else None,
            )
        if done and origins is not None:
            self._keeper.replaced(origins)
        return done

    # What blocks are entered with

    @abstractmethod
    def _noisy(self) -> list[Uncertain]:
        """Group by group, what samples are drawn of."""

    @final
    def _uncertain(self) -> Drawn:
        if self._shards.sharded:  # collective: the ranks put their parts together
            with self._shards.drawing(self):
                for p in (p for group in self.param_groups if is_relative(group) for p in group["params"]):
                    if SCALE not in self.state[p]:  # now that it is whole
                        self.state[p][SCALE] = start_scale(p)
                return self._drawn()
        return self._drawn()

    def _drawn(self) -> Drawn:
        noisy = self._noisy()
        if not self.settings["averaging"]:
            return Drawn(noisy, [])
        resting = [group for group in self.param_groups if group["deterministic"] or not noisy]
        plans = [self._plan(group) for group in resting]
        states = [(p, own) for plan in plans for p, own in zip(plan.parameters, plan.states, strict=True)]
        return Drawn(noisy, [(p, own["offset"]) for p, own in states if "offset" in own])

    @final
    def _numbers(self, group: dict[str, Any], states: Sequence[Mapping[str, Any]]) -> TensorNumbers:
        """α, γ, τ and δ of tensors with these states: one for all, or, where they are relative, one for each."""
        if not is_relative(group):
            return numbers(group, None, self.data_size, 1.0)
        grown = self._growth()
        found = [numbers(group, own[SCALE], self.data_size, grown) for own in states]
        return TensorNumbers(*map(list, zip(*found, strict=True)))

    def _numbers_of(self, group: dict[str, Any], p: Tensor) -> TensorNumbers:
        """α, γ, τ and δ of one parameter, which may not have seen data yet."""
        scale = None
        if is_relative(group):
            scale = self.state[p].get(SCALE)
            scale = start_scale(p) if scale is None else scale
        return numbers(group, scale, self.data_size, self._growth())

    @final
    def _plan(self, group: dict[str, Any]) -> Plan:
        known = self._plans.get(id(group))
        if known is None or not known.fits(group, self.state):
            for p in group["params"]:
                if p.requires_grad:
                    own = self._moved_state(group, p)
                    refuse_other_sizes(group, p, {} if self._shards.sharded else own)
            known = Plan(group, self.state)
            self._plans.forget_all_but(self.param_groups)
            if known.keeps and not self._shards.sharded:  # sharded, whole states are there for a moment only
                self._plans[id(group)] = known
        return known

    @final
    def _moved_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device; with a given start the curvature is there at once."""
        state: dict[str, Tensor] = self.state[p]
        known = state.get("curvature")
        if known is not None and known.device == p.device:
            return state
        for key, value in state.items():
            state[key] = value if key == SCALE else value.to(p.device)
        if known is None and (start := self._start(group, p)) is not None:
            state["curvature"] = torch.zeros_like(widen(p.detach())) + start
            if self.settings["averaging"] and averages(group):
                state["offset"] = torch.zeros_like(p.detach())
            if is_relative(group):
                self._set_scales([state], [p], None)
        return state

    def _start(self, group: dict[str, Any], p: Tensor) -> float | Tensor | None:
        """s₀ where it is given; from a precision P it is max(0, τP/N − δ̃), so that the total is max(P, the prior's).

        Squares are never negative: below the prior's precision P would ask for that, and for steps of more than
        α(μ − μ₀) towards the prior, which diverge.
        """
        precision = self.settings["initial_precision"]
        if precision is None:
            return self.settings["initial_curvature"]  # type: ignore[no-any-return]
        missing = group["tempering"] * precision / self.data_size - self._shrinkage(group, p)
        return missing.clamp(min=0.0) if isinstance(missing, Tensor) else max(missing, 0.0)

    def _shrinkage(self, group: dict[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ = τδ/N, a number or, under a posterior as prior, one a weight; none for normalisation layers."""
        if group["deterministic"]:
            return 0.0
        own = self._numbers_of(group, p)
        precision: float | Tensor = self.state[p].get("prior_precision", own.prior_precision)
        unit: float = own.tempering / self.data_size
        return precision * unit

    @final
    def _shrinkages(
        self, group: dict[str, Any], states: Sequence[Mapping[str, Any]], own: TensorNumbers
    ) -> ListNumbers | list[Tensor]:
        """δ̃ = τδ/N for parameters of one group with these states: numbers, or under a posterior as prior tensors."""
        if group["deterministic"]:
            return 0.0
        size = self.data_size
        if "prior_precision" not in states[0]:
            return divided(products(own.tempering, own.prior_precision), size)
        units = each(divided(own.tempering, size), len(states))
        return list(torch._foreach_mul([own["prior_precision"] for own in states], list(units)))

    @final
    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter with what is known of it, in order."""
        names = self.names()
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    state = self._moved_state(group, p)
                    own = self._numbers_of(group, p)
                    yield Belief(
                        names[id(p)],
                        p,
                        state.get("curvature"),
                        self._shrinkage(group, p),
                        own._replace(prior_precision=math.nan) if "prior_precision" in state else own,
                        self.data_size,
                        group["deterministic"],
                    )

    # What is believed

    @final
    @torch.no_grad()
    @whole(WIDTHS)
    def posterior(self, *, damped: bool = True) -> DiagonalPosterior:
        """N(μ, diag σ²). `damped=False` leaves γ out of σ², which is then the pure posterior."""
        self._refuse_inside("take the posterior")
        mean = {b.name: b.parameter.detach() for b in self.beliefs()}
        variance = {b.name: b.variance(damped) for b in self.beliefs() if not b.deterministic}
        first = self.param_groups[0]
        metadata = {
            "method": type(self).__name__,
            "data_size": self.settings["data_size"],
            "augmentation": self.settings["augmentation"],
            "tempering": first["tempering"],
            "prior_precision": first["prior_precision"],
            "damping": first["damping"],
            "noise": first["noise"],
            "relative_damping": first["relative_damping"],
            "step": self.counters["step"],
        }
        return DiagonalPosterior(mean, variance, metadata)

    @final
    @whole(WIDTHS)
    def curvature(self) -> dict[str, Tensor]:
        """s by name: the running mean of squared per-example gradients; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}

    @final
    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members = set(map(id, group["params"]))
        return [part_of(b) for b in self.beliefs() if id(b.parameter) in members]


def _check_start(curvature: float | None, precision: float | None) -> None:
    if curvature is not None:
        arguments.number("initial_curvature", curvature, 0, math.inf, open_low=True)
    if precision is not None:
        arguments.number("initial_precision", precision, 0, math.inf, open_low=True)
    if curvature is not None and precision is not None:
        raise InvalidValue(
            f"initial_curvature={curvature} and initial_precision={precision} exclude each other. Choose one."
        )
