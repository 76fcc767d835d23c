"""VOGN and OGN (Khan et al. 2018; Osawa et al. 2019, Algorithm 1): a running mean of squared per-example gradients.

μ the mean, m the momentum, s the curvature; gᵢ the gradient of example i's loss at the weights w; N the data size times
ρ, δ̃ = τδ/N with the prior N(μ₀, 1/δ); the rest as in the arguments of `VOGN`.

    ĝ = mean of gᵢ,  ĥ = mean of gᵢ²          over K samples w and M examples, element by element
    m ← β₁·m + ĝ + δ̃(μ − μ₀)
    s ← (1 − β₂)·s + β₂·ĥ                     the first squares are the first s
    μ ← μ − α·m / (s + δ̃ + γ)
    σ² = τ / (N(s + δ̃ + γ))

VOGN takes gradients at samples w = μ + σ·ε, OGN at the mean. At the fixed point the precision 1/σ² is N·h/τ + δ (γ
aside). The paper's Algorithm 1 is this at τ = 1; for other τ its precision tends to N·h/τ + τδ, which is a misprint.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.intercept import watching
from credo.curvature.many_samples import StackedWeights
from credo.curvature.rule import widen
from credo.distributed.sharding import WIDTHS, gathered
from credo.errors import InvalidValue
from credo.kernels import noise, update
from credo.kernels.stacked_noise import sample_stacks_
from credo.optim import arguments
from credo.optim.blocks import finish_at_once
from credo.optim.checkpoints import SCALE
from credo.optim.diagonal import DiagonalOptimizer, Noisy, Resting
from credo.optim.groups import refuse_other_sizes
from credo.optim.means import averaged, averaging_weight, can_average
from credo.optim.relative import (
    TINY,
    Given,
    averaging_of,
    check_relative,
    is_relative,
    own_options,
    start_scale,
    take_absolute,
)
from credo.optim.statistics import SquareStatistics, StepStatistics
from credo.posterior import DiagonalPosterior, Posterior

FIRST_STEPS, EVERY = 20, 5  # how often mean curvatures are measured: every step at first, then every fifth


def vogn_update(
    mean: Tensor,  # μ
    momentum: Tensor,  # m
    curvature: Tensor,  # s
    grad: Tensor,  # ĝ
    squares: Tensor,  # ĥ
    *,
    lr: float,  # α
    beta1: float,  # β₁
    beta2: float,  # β₂
    prior: float | Tensor,  # δ̃
    prior_mean: Tensor | None,  # μ₀, zero when None
    damping: float,  # γ
) -> tuple[Tensor, Tensor, Tensor]:
    """μ, m and s after one update. `kernels.update.vogn_` does the same in one pass; the tests hold it to this."""
    away = mean if prior_mean is None else mean - prior_mean
    momentum = beta1 * momentum + grad + prior * away
    curvature = (1 - beta2) * curvature + beta2 * squares
    return mean - lr * momentum / (curvature + prior + damping), momentum, curvature


def variance(
    curvature: Tensor | float, *, data_size: float, tempering: float, prior: float | Tensor, damping: float
) -> Tensor | float:
    """σ²."""
    return tempering / data_size / (curvature + prior + damping)


def averaged_update(
    mean: Tensor,
    momentum: Tensor,
    curvature: Tensor,
    grad: Tensor,
    squares: Tensor,
    offset: Tensor | None,  # z − μ
    *,
    weight: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`vogn_update` of the iterate z where the mean is an average of iterates; μ, m, s and z − μ after it."""
    iterate = mean if offset is None else mean + offset
    iterate, momentum, curvature = vogn_update(iterate, momentum, curvature, grad, squares, **options)
    if offset is None:
        return iterate, momentum, curvature, None
    mean, offset = averaged(mean, iterate, weight)
    return mean, momentum, curvature, offset


class _Ready(NamedTuple):
    """The parameters of one group that have a gradient and squares in this step."""

    group: dict[str, Any]
    parameters: list[Tensor]
    states: list[dict[str, Tensor]]
    gradients: list[Tensor]
    squares: list[Tensor]

    def begin(self, unit: float, averages: bool) -> None:
        """State for a parameter at its first gradient: m₀ = 0, s₀ the first squares, unless it is given.

        If the mean is an average, the iterate starts at it, z − μ = 0.
        """
        for p, squares in zip(self.parameters, self.squares, strict=True):
            refuse_other_sizes(self.group, p, {"squares": squares})
        for p, own, squares in zip(self.parameters, self.states, self.squares, strict=True):
            if "momentum" not in own:
                own["momentum"] = torch.zeros_like(widen(p.detach()))
            if "curvature" not in own:
                own["curvature"] = squares * unit
            if averages and "offset" not in own:
                own["offset"] = torch.zeros_like(p.detach())


class _GaussNewton(DiagonalOptimizer):
    """The state and the update; whether gradients are taken at samples or at the mean is left to the method."""

    _updates_from_backup = True
    _gathered: SquareStatistics
    _stacked: StackedWeights | None = None  # the samples of the slices of the block that begins

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None,
        damping: float | None,
        tempering: float | None,
        prior_precision: float | None,
        prior: Posterior | None,
        group: dict[str, Any],
        settings: dict[str, Any],
    ):
        """`group` are further options of a parameter group, `settings` hold for all."""
        curvature, precision = settings["initial_curvature"], settings["initial_precision"]
        given = Given(lr, damping, tempering, prior_precision, precision is not None)
        settings["averaging"] = averaging_of(settings["averaging"], lr)
        settings["mc_slices"] = arguments.whole("mc_slices", settings["mc_slices"], 1)
        if settings["vectorized"] and settings["mc_slices"] > 1:
            raise InvalidValue(
                f"vectorized=True and mc_slices={settings['mc_slices']} exclude each other. Choose one."
            )
        _check_start(curvature, precision)
        super().__init__(params, {**given.options(), **group}, settings, prior)

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

    # Blocks

    @final
    def _observe(self, parameters: list[Tensor]) -> AbstractContextManager[SquareAccumulator]:
        stacks, self._stacked = self._stacked, None
        return watching(self._subjects(parameters), self.settings["reduction"], transform=stacks)

    @final
    def _nothing_gathered(self) -> SquareStatistics:
        return SquareStatistics()

    @final
    def supply(self, squares: Mapping[Tensor, Tensor], examples: int) -> None:
        """Declares that `.grad` holds the gradient, and gives Σᵢ gᵢ² over `examples`; the next `step()` uses both.

        The deterministic core, for gradients that were not taken in a block.
        """
        arguments.whole("examples", examples, 1)
        for p, square in squares.items():
            if square.shape != p.shape:
                raise InvalidValue(
                    f"squares of shape {tuple(square.shape)} for a parameter of shape {tuple(p.shape)}."
                )
        self._gathered = self._nothing_gathered()
        self._gathered.supply({id(p): square.detach().clone() for p, square in squares.items()}, examples)

    @final
    def _uncertain(self) -> tuple[list[Noisy], list[Resting]]:
        if not self._shards.sharded:
            return self._noisy(), self._resting()
        with self._shards.drawing(self):  # collective: the ranks put their parts together
            for p in (p for group in self.param_groups if is_relative(group) for p in group["params"]):
                if SCALE not in self.state[p]:  # now that it is whole
                    self.state[p][SCALE] = start_scale(p)
            return self._noisy(), self._resting()

    # The update

    @final
    @torch.no_grad()
    def _update(self, gathered: StepStatistics) -> bool:
        assert isinstance(gathered, SquareStatistics)
        ready = [found for group in self.param_groups if (found := self._ready(group, gathered.squares))]
        check = self._are_all(ready, gathered)
        if not check and not self._finite(gathered):
            return False
        gradient_unit = gathered.gradient_unit(self.settings["reduction"])
        squares_unit = gathered.unit / (gathered.samples * gathered.squares_scale**2)
        self._begin(ready, gradient_unit, squares_unit)
        if gathered.supplied:  # at the parameters, which are the iterates then
            for offset in (own["offset"] for one in ready for own in one.states if "offset" in own):
                offset.zero_()
        for one in ready:
            if not self._update_group(one, gradient_unit, squares_unit, check):
                return False
        step = self.counters["step"]
        if step < FIRST_STEPS or step % EVERY == 0:  # a mean over the last ten or so
            self._measure(ready)
        return True

    def _update_group(self, ready: _Ready, gradient_unit: float, squares_unit: float, check: bool) -> bool:
        group, states = ready.group, dict(zip(ready.parameters, ready.states, strict=True))
        own = self._numbers(group, ready.states)
        names = "momentum", "curvature", "offset", "prior_mean"
        means, momenta, curvatures, offsets, prior_means = self._lists_of(group, states, *names)
        assert momenta is not None
        assert curvatures is not None
        backup = self._backup.taken(means)
        done = update.vogn_(
            averaged_update,
            *(means, momenta, curvatures, ready.gradients, ready.squares),
            self._shrinkages(group, ready.states, own),
            prior_means,
            update.VOGNNumbers(
                [n.lr for n in own],
                group["momentum"],
                group["ema_rate"],
                [n.damping for n in own],
                gradient_unit,
                squares_unit,
                averaging_weight(self.settings["averaging"], self.counters["step"]),
            ),
            offsets,
            backup,
            check,
        )
        if done and backup is not None:
            self._backup.forget(backup)
        return done

    def _ready(self, group: dict[str, Any], squares: Mapping[int, Tensor]) -> _Ready | None:
        """What a step has for the parameters of a group, whose sums of squares are known by their ids."""
        found = _Ready(group, [], [], [], [])
        for p, state in self._states(group).items():
            gradient, own = p.grad, squares.get(id(p))
            if gradient is not None and own is not None:
                found.parameters.append(p)
                found.states.append(state)
                found.gradients.append(gradient)
                found.squares.append(own)
        return found if found.parameters else None

    def _are_all(self, ready: Sequence[_Ready], gathered: SquareStatistics) -> bool:
        """Whether there are no other numbers in the step: the kernel looks at these on its way, before all else."""
        if len(ready) != 1 or len(self.param_groups) != 1 or self._shards.sharded:
            return False
        if not len(ready[0].parameters) == len(gathered.squares) == len(self._trainable()):
            return False
        if not all("momentum" in own and "curvature" in own for own in ready[0].states):
            return False
        return gathered.loss is None or math.isfinite(gathered.loss)

    def _begin(self, ready: Sequence[_Ready], gradient_unit: float, squares_unit: float) -> None:
        """State for parameters at their first gradient."""
        new = []
        for one in ready:
            if any("momentum" not in own or "curvature" not in own for own in one.states):
                one.begin(squares_unit, bool(self.settings["averaging"]) and can_average(one.group))
            if is_relative(one.group):
                missing = [k for k, own in enumerate(one.states) if SCALE not in own or not own[SCALE][2]]
                new += [(one, k) for k in missing]
        if new:
            self._set_scales(
                [one.states[k] for one, k in new],
                [one.parameters[k] for one, k in new],
                [one.gradients[k] * gradient_unit for one, k in new],
            )

    def _measure(self, ready: Sequence[_Ready]) -> None:
        """Follows the mean curvature of each tensor whose numbers depend on it."""
        states = [own for one in ready if is_relative(one.group) for own in one.states]
        if not states:
            return
        if self._shards.sharded:
            parameters = [p for one in ready if is_relative(one.group) for p in one.parameters]
            self._set_scales(states, parameters, None)
            return
        for own in states:
            own[SCALE][1] = max(float(own["curvature"].mean()), TINY)

    @final
    def _moved_state(self, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device; with a given start the curvature is there at once."""
        state: dict[str, Tensor] = self.state[p]
        known = state.get("curvature")
        if known is not None and known.device == p.device:
            return state
        for key, value in state.items():
            state[key] = value if key == SCALE else value.to(p.device)
        if known is None and (start := self._start(group, p)) is not None:
            state["curvature"] = torch.zeros_like(widen(p.detach())) + start
            if self.settings["averaging"] and can_average(group):
                state["offset"] = torch.zeros_like(p.detach())
            if is_relative(group):
                self._set_scales([state], [p], None)
        return state

    def _start(self, group: Mapping[str, Any], p: Tensor) -> float | Tensor | None:
        """s₀ where it is given; from a precision P it is max(0, τP/N − δ̃), so that the total is max(P, the prior's).

        Squares are never negative: below the prior's precision P would ask for that, and for steps of more than
        α(μ − μ₀) towards the prior, which diverge.
        """
        precision = self.settings["initial_precision"]
        if precision is None:
            return self.settings["initial_curvature"]  # type: ignore[no-any-return]
        missing = group["tempering"] * precision / self.data_size - self._shrinkage(group, p)
        return missing.clamp(min=0.0) if isinstance(missing, Tensor) else max(missing, 0.0)

    # What is believed

    @final
    @torch.no_grad()
    @gathered(WIDTHS)
    def posterior(self, *, damped: bool = True) -> DiagonalPosterior:
        """N(μ, diag σ²). `damped=False` leaves γ out of σ², which is then the pure posterior."""
        self._refuse_inside("take the posterior")
        mean = {b.name: b.parameter.detach() for b in self.beliefs()}
        variances: dict[str, Any] = {
            b.name: variance(
                torch.zeros_like(widen(b.parameter.detach())) if b.curvature is None else b.curvature,
                data_size=b.data_size,
                tempering=b.tempering,
                prior=b.shrinkage,
                damping=b.damping if damped else 0.0,
            )
            for b in self.beliefs()
            if not b.deterministic
        }
        options = "tempering", "prior_precision", "damping", "noise", "relative_damping"
        return DiagonalPosterior(mean, variances, self._metadata(*options))


@final
class VOGN(_GaussNewton):
    r"""A drop-in for Adam that leaves a posterior behind.

        optimizer = credo.VOGN(model, data_size=len(train_set))
        loss = optimizer.step(closure)          # or: with optimizer.sampled(): ...; optimizer.step()
        posterior = optimizer.posterior()

    The update, element by element (ĝ and ĥ the mean gradient and the mean squared gradient of the examples):

        m ← β₁·m + ĝ + δ̃(μ − μ₀),   s ← (1 − β₂)·s + β₂·ĥ,   μ ← μ − α·m/(s + δ̃ + γ),   δ̃ = τδ/N

    taken at samples w = μ + σ·ε with σ² = τ/(N(s + δ̃ + γ)). Implementations differ: the paper's δ̃ is of τ = 1, some
    have m as a mean of gradients (β₁ and 1 − β₁), and none of them averages its iterates.

    params: a module (its normalisation layers become deterministic), named_parameters(), parameters(), or
        parameter groups, each with its own lr, momentum, ema_rate, prior_precision, damping, tempering,
        deterministic.
    data_size: N, the number of training examples.
    lr, damping, tempering, prior_precision: α, γ, τ, δ; None, chosen for each tensor from its weights, its squares and
        the first gradient (docs/defaults.md). A number that is given is absolute: lr is not on Adam's scale.
    averaging: η, the mean is over about the last 1/(η + 1) of all steps; 0: the last iterate. None: 8, or 0 with an lr.
    momentum: β₁, as in SGD: the sum of past gradients, not their mean.
    ema_rate: β₂, weighs the *new* squares, unlike Adam's β₂, which weighs the old ones.
    prior_precision: δ of the prior N(0, 1/δ); weight decay is δ/N.
    prior: a posterior to start from, N(μ₀, 1/P₀) with a precision a weight; `prior_precision` is then unused.
    damping: γ, keeps steps and noise bounded where the squares are small; it is part of σ² (see `posterior`).
    tempering: τ, the weight of the KL term, in (0, 1]; schedule it with `credo.TemperingSchedule`.
    augmentation: ρ, how many times larger the data are for being augmented; N is multiplied by it.
    mc_samples: K weight samples a step, each on the whole minibatch. With vectorized=True they are computed
        together, from a closure that returns losses without calling backward; numbers are the same.
    mc_slices: cuts the minibatch into slices, each with a weight sample of its own (the paper's scheme).
    initial_curvature: s₀. None takes the squares of the first minibatch; the first step is then at the mean.
    initial_precision: instead of s₀, where 1/σ² starts; where the prior is sharper, it starts there. Its excess over
        the prior fades as (1 − β₂)ᵗ, and what is left of it at the end counts as if it had been learned from data.
    seed: of the samples; the global generator is not used.
    shared_noise: among several processes, the same samples on all ranks instead of each rank's own.
    sharded: among several processes, each rank keeps and updates its part of curvature and momentum only; samples and
        `posterior`, `state_dict` and the like are then taken by all ranks together (docs/distributed.md).
    mc_groups: among several processes, as given to `credo.distributed.data_share`: ranks of a group read the same data.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.

    >>> import torch, credo
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = credo.VOGN(model, data_size=100, lr=0.1)
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     loss.backward()
    ...     return loss
    >>> loss = optimizer.step(closure)
    >>> sorted(optimizer.posterior().variance)
    ['bias', 'weight']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,  # α
        *,
        data_size: float,  # N
        momentum: float = 0.9,  # β₁
        ema_rate: float = 0.1,  # β₂
        prior_precision: float | None = None,  # δ
        prior: Posterior | None = None,
        damping: float | None = None,  # γ
        tempering: float | None = None,  # τ
        averaging: float | None = None,  # η
        mc_samples: int = 1,  # K
        mc_slices: int = 1,
        vectorized: bool = False,
        augmentation: float = 1.0,  # ρ
        initial_curvature: float | None = None,  # s₀
        initial_precision: float | None = None,
        reduction: str = "mean",
        seed: int = 0,
        shared_noise: bool = False,
        sharded: bool = False,
        mc_groups: int | None = None,
    ):
        settings = {
            "data_size": data_size,
            "augmentation": augmentation,
            "mc_samples": mc_samples,
            "mc_slices": mc_slices,
            "vectorized": vectorized,
            "initial_curvature": initial_curvature,
            "initial_precision": initial_precision,
            "averaging": averaging,
            "reduction": reduction,
            "seed": seed,
            "shared_noise": shared_noise,
            "sharded": sharded,
            "mc_groups": mc_groups,
        }
        group = {"momentum": momentum, "ema_rate": ema_rate}
        super().__init__(params, lr, damping, tempering, prior_precision, prior, group, settings)

    def _draw(self, draw: int) -> int:
        slices: int = self.settings["mc_slices"]
        if slices > 1:
            self._stacked = self._stacks(draw, slices)
            return slices
        noisy, resting = self._uncertain()
        for own in noisy:
            noise.sample_all_(
                *(own.weights, own.curvatures, own.scale, own.shift),
                *(self.settings["seed"], draw, own.places),
                backup=self._backup.take(own.weights),
                offsets=own.offsets,
            )
        self._place_iterates(resting)
        return 1

    def _stacks(self, draw: int, samples: int) -> StackedWeights:
        """The samples number draw, draw + 1, … side by side; the parameters keep the mean."""
        noisy, resting = self._uncertain()
        self._place_iterates(resting)  # the same for all samples
        stacks: dict[int, Tensor] = {}
        for own in noisy:
            means = [p.detach() for p in own.weights]
            if own.offsets is not None:
                means = list(torch._foreach_add(means, list(own.offsets)))
            rows = [mean.new_empty((samples, *mean.shape)) for mean in means]
            numbers = own.curvatures, own.scale, own.shift
            sample_stacks_(rows, means, *numbers, self.settings["seed"], draw, own.places)
            stacks |= {id(p): row for p, row in zip(own.weights, rows, strict=True)}
        return StackedWeights(stacks, samples)

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """All K samples by one run of the closure under torch.vmap; K·M examples of one mean loss."""
        parameters, samples = self._trainable(), self.settings["mc_samples"]
        try:  # parameters without noise may be moved
            stacks = self._stacks(self._stream(), samples)
            for p in parameters:
                p.grad = None
            with watching(self._subjects(parameters), "mean", transform=stacks, samples=samples) as stats:
                loss = finish_at_once(stacks, closure, stats)
        finally:
            self._end_block()
        self.counters["draws"] += samples
        self._gather(stats, parameters, None, None)
        self._gathered.vectorized = True
        return loss


@final
class OGN(_GaussNewton):
    """As `VOGN`, without noise in the weights; the arguments mean the same.

    The deterministic version (Osawa et al. 2019, appendix D). Its posterior N(μ, σ²) is a Laplace approximation. Tune
    it like Adam first, then move to VOGN with the same numbers.

    params: a module, named_parameters(), parameters(), or parameter groups.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr, damping, tempering, prior_precision: None, chosen for each tensor (docs/defaults.md).
    momentum, ema_rate: β₁, as in SGD, and the weight of the *new* squares.
    averaging: η, the mean is over about the last 1/(η + 1) of all steps; 0: the last iterate.
    prior: a posterior to start from; `prior_precision` is then unused.
    initial_curvature, initial_precision: s₀, or where 1/σ² starts.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of draws from the posterior; steps have no noise.
    sharded, mc_groups: among several processes, as for `VOGN`.

    >>> import torch, credo
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = credo.OGN(model, data_size=100)
    >>> loss = optimizer.step(lambda: (model(torch.ones(8, 2)) - 1).square().squeeze(1))
    >>> optimizer.counters["step"]
    1
    """

    _trains_with_noise = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,  # α
        *,
        data_size: float,  # N
        momentum: float = 0.9,  # β₁
        ema_rate: float = 0.1,  # β₂
        prior_precision: float | None = None,  # δ
        prior: Posterior | None = None,
        damping: float | None = None,  # γ
        tempering: float | None = None,  # τ
        averaging: float | None = None,  # η
        augmentation: float = 1.0,  # ρ
        initial_curvature: float | None = None,  # s₀
        initial_precision: float | None = None,
        reduction: str = "mean",
        seed: int = 0,
        sharded: bool = False,
        mc_groups: int | None = None,
    ):
        settings = {
            "data_size": data_size,
            "augmentation": augmentation,
            "mc_samples": 1,
            "mc_slices": 1,
            "vectorized": False,
            "initial_curvature": initial_curvature,
            "initial_precision": initial_precision,
            "averaging": averaging,
            "reduction": reduction,
            "seed": seed,
            "shared_noise": False,
            "sharded": sharded,
            "mc_groups": mc_groups,
        }
        group = {"momentum": momentum, "ema_rate": ema_rate}
        super().__init__(params, lr, damping, tempering, prior_precision, prior, group, settings)

    def _draw(self, draw: int) -> int:
        """The iterate is the sample."""
        self._place_iterates(self._uncertain()[1])
        return 1


def _check_start(curvature: float | None, precision: float | None) -> None:
    if curvature is not None:
        arguments.number("initial_curvature", curvature, 0, math.inf, open_low=True)
    if precision is not None:
        arguments.number("initial_precision", precision, 0, math.inf, open_low=True)
    if curvature is not None and precision is not None:
        raise InvalidValue(
            f"initial_curvature={curvature} and initial_precision={precision} exclude each other. Choose one."
        )
