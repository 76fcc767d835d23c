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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.contribution import widen
from credo.errors import InvalidValue
from credo.kernels import update
from credo.optim import arguments
from credo.optim.beliefs import Belief
from credo.optim.defaults import rate_and_damping
from credo.optim.diagnostics import Part, part_of
from credo.optim.gathering import Gathered, GatheredSquares
from credo.optim.plan import Plan, Ready, ready_rows, refuse_other_sizes
from credo.optim.priors import take_prior
from credo.optim.shards import WIDTHS, whole
from credo.optim.squares import SquaresOptimizer
from credo.posterior import DiagonalPosterior, Posterior


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
        prior_precision: float,
        prior: Posterior | None,
        damping: float | None,
        tempering: float,
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
    ):
        size = arguments.whole("data_size", data_size, 1)
        rho = arguments.number("augmentation", augmentation, 1, math.inf)
        lr, damping = rate_and_damping(lr, damping, size * rho)
        defaults = {
            "lr": arguments.learning_rate(lr),  # α
            "momentum": momentum,  # β₁
            "ema_rate": ema_rate,  # β₂
            "prior_precision": prior_precision,  # δ
            "damping": damping,  # γ
            "tempering": tempering,  # τ
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
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
        }
        if vectorized and mc_slices > 1:
            raise InvalidValue(f"vectorized=True and mc_slices={mc_slices} exclude each other. Choose one.")
        _check_start(initial_curvature, initial_precision)
        super().__init__(params, defaults, settings)
        if prior is not None:
            take_prior(self, prior)

    @final
    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        arguments.number("momentum", group["momentum"], 0, 1, open_high=True)
        arguments.number("ema_rate", group["ema_rate"], 0, 1, open_low=True)
        arguments.number("prior_precision", group["prior_precision"], 0, math.inf)
        arguments.number("damping", group["damping"], 0, math.inf)
        arguments.number("tempering", group["tempering"], 0, 1, open_low=True)
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
        return all(self._update_group(one, gradient_unit, squares_unit, check) for one in ready)

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
        if ready.plan is None:
            ready.begin(squares_unit)
        numbers = update.Settings(
            float(group["lr"]),
            group["momentum"],
            group["ema_rate"],
            group["damping"],
            gradient_unit,
            squares_unit,
        )
        unit = group["tempering"] / self.data_size
        origins, prior = self._keeper.kept(parameters), self._shrinkages(group, ready.states, unit)
        updater = None if ready.plan is None else ready.plan.updater(origins)
        if updater is not None and isinstance(prior, float):
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
            )
        if done and origins is not None:
            self._keeper.replaced(origins)
        return done

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
            state[key] = value.to(p.device)
        if known is None and (start := self._start(group, p)) is not None:
            state["curvature"] = torch.zeros_like(widen(p.detach())) + start
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
        unit: float = group["tempering"] / self.data_size
        precision: float | Tensor = self.state[p].get("prior_precision", group["prior_precision"])
        return precision * unit

    @final
    def _shrinkages(
        self, group: dict[str, Any], states: Sequence[Mapping[str, Tensor]], unit: float
    ) -> float | list[Tensor]:
        """δ̃ for parameters of one group with these states, `unit` = τ/N: one number for all, or a tensor for each."""
        if group["deterministic"]:
            return 0.0
        if "prior_precision" not in states[0]:
            return float(group["prior_precision"] * unit)
        return list(torch._foreach_mul([own["prior_precision"] for own in states], unit))

    @final
    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter with what is known of it, in order."""
        names = self.names()
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    yield Belief(
                        names[id(p)],
                        p,
                        self._moved_state(group, p).get("curvature"),
                        self._shrinkage(group, p),
                        group["damping"],
                        group["tempering"],
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
