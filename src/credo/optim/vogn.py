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
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.intercept import watching
from credo.curvature.many_samples import StackedWeights
from credo.curvature.rule import widen
from credo.curvature.tracking import WatchedParameters
from credo.curvature.uncompiled import uncompiled
from credo.distributed.sharding import WIDTHS, gathered
from credo.errors import InvalidValue, UnsupportedOperation
from credo.kernels import noise, update
from credo.kernels.stacked_noise import sample_stacks_
from credo.kernels.tensors import is_on_cpu
from credo.optim import arguments
from credo.optim.checkpoints import SCALE
from credo.optim.closures import finish_at_once
from credo.optim.groups import refuse_other_sizes
from credo.optim.relative import TINY, Given, averaging_of, can_average
from credo.optim.scales import (
    DampedOptimizer,
    DiagonalOptimizer,
    GroupRows,
    is_relative,
    of_averages,
    place_iterates,
)
from credo.optim.statistics import SquareStatistics, StepStatistics
from credo.posterior import DiagonalPosterior, Posterior

FIRST_STEPS, EVERY = 20, 5  # how often mean curvatures are measured: every step at first, then every fifth


def vogn_update(
    mean: Tensor, momentum: Tensor, curvature: Tensor,  # μ, m, s
    grad: Tensor, squares: Tensor, *,  # ĝ, ĥ
    lr: float, beta1: float, beta2: float, damping: float,  # α, β₁, β₂, γ
    prior: float | Tensor, prior_mean: Tensor | None,  # δ̃; μ₀, zero when None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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


averaged_update = of_averages(vogn_update)  # where the mean is an average of iterates; with z − μ after ĥ


KEPT = "momentum", "curvature", "offset", "prior_mean"  # beside each parameter


class _GaussNewton(DampedOptimizer, DiagonalOptimizer):
    """The state and the update; whether gradients are taken at samples or at the mean is left to the method."""

    _updates_from_backup = True
    _statistics = SquareStatistics
    _gathered: SquareStatistics
    _stacked: StackedWeights | None = None  # the samples of the slices of the block that begins

    def __init__(
        self,
        params: Any,
        given: Given,
        prior: Posterior | None,
        group: dict[str, Any],
        settings: dict[str, Any],
    ):
        """`group` are further options of a parameter group, `settings` hold for all."""
        settings["averaging"] = averaging_of(settings["averaging"], given.lr)
        settings["mc_slices"] = arguments.whole("mc_slices", settings["mc_slices"], 1)
        if settings["vectorized"] and settings["mc_slices"] > 1:
            raise InvalidValue(
                f"vectorized=True and mc_slices={settings['mc_slices']} exclude each other. Choose one."
            )
        arguments.start(settings["initial_curvature"], settings["initial_precision"])
        super().__init__(params, {**given.options(), **group}, settings, prior)

    @final
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes exactly; refuses the state of another model or method, and then has changed nothing."""
        super().load_state_dict(state_dict)
        if "averaging" not in state_dict["credo"]["settings"]:  # saved before there was an average
            self.settings["averaging"] = 0.0

    # What is observed

    @final
    def _observe(self, watched: WatchedParameters) -> AbstractContextManager[SquareAccumulator]:
        stacks, self._stacked = self._stacked, None
        block = watching(watched, self.settings["reduction"], transform=stacks)
        # `corrected` knows what to do about one sample in one pass.
        alone = self._reducer.alone and self.settings.get("accumulate", 1) == 1
        block.accumulator.assumes = alone and stacks is None and self.settings["mc_samples"] == 1
        return block

    @final
    def supply(self, squares: Mapping[Tensor, Tensor], examples: int) -> None:
        """Declares that `.grad` holds the gradient, and gives Σᵢ gᵢ² over `examples`; the next `step()` uses both.

        The deterministic core, for gradients that were not taken in a block.
        """
        arguments.whole("examples", examples, 1)
        if self._shards is not None:
            raise UnsupportedOperation(
                "supply() on the parameters of fully_shard (FSDP2), of which this rank has its rows only. Take "
                "gradients in blocks, or train the plain module with sharded=True."
            )
        for p, square in squares.items():
            if square.shape != p.shape:
                raise InvalidValue(
                    f"squares of shape {tuple(square.shape)} for a parameter of shape {tuple(p.shape)}."
                )
        self._gathered = SquareStatistics()
        self._gathered.supply({id(p): square.detach().clone() for p, square in squares.items()}, examples)

    # The update

    @final
    @torch.no_grad()
    def _update(self, gathered: StepStatistics) -> bool:
        assert isinstance(gathered, SquareStatistics)
        groups = self._rows(*KEPT, reached=gathered.squares)
        here, flags = all(map(is_on_cpu, gathered.squares.values())), None
        if not here and not gathered.supplied and not self._reducer.sharded:
            flags = gathered.flags(self._trainable()) if all(rows.complete for rows in groups) else None
        # On the CPU the kernel looks whether they are finite, on its way.
        check = flags is None and self._are_all(groups, gathered)
        if flags is None and not check and not self._finite(gathered):
            return False
        squares_unit = gathered.unit / (gathered.samples * gathered.squares_scale**2)
        if not all(rows.complete for rows in groups):
            self._begin(groups, gathered, squares_unit)
            groups = self._rows(*KEPT, reached=gathered.squares)
        if gathered.supplied:  # at the parameters, which are the iterates then
            for offset in (own["offset"] for rows in groups for own in rows.states if "offset" in own):
                offset.zero_()
        for rows in groups:
            momenta, curvatures, offsets, prior_means = rows.lists.values()
            assert momenta is not None
            assert curvatures is not None
            done = update.vogn_(
                averaged_update,
                *(rows.parameters, momenta, curvatures),
                [p.grad for p in rows.parameters],  # type: ignore[misc]
                [gathered.squares[id(p)] for p in rows.parameters],
                rows.priors,
                prior_means,
                update.VOGNNumbers(
                    *(rows.numbers.lr, rows.group["momentum"], rows.group["ema_rate"], rows.numbers.damping),
                    *(gathered.gradient_unit, squares_unit, gathered.weight),
                ),
                offsets,
                self._backup,
                check,
                flags,
            )
            if not done:
                return False
        step = self.counters["step"]
        due = step < FIRST_STEPS or step % EVERY == 0  # of a mean over the last ten or so
        if due and self._reducer.sharded:
            self._measure_together(groups)
        elif due and here:
            for rows in groups:
                for own in rows.states if rows.relative else ():
                    own[SCALE][1] = max(float(own["curvature"].mean()), TINY)
        elif due:
            self._ask_for_means([own for rows in groups if rows.relative for own in rows.states], gathered)
        if here or gathered.judge(flags):
            return True
        return gathered.corrected() and self._update(gathered)

    def _are_all(self, groups: Sequence[GroupRows], gathered: SquareStatistics) -> bool:
        """Whether there are no other numbers in the step."""
        if len(groups) != 1 or len(self.param_groups) != 1 or self._reducer.sharded:
            return False
        trainable = [p for p in groups[0].group["params"] if p.requires_grad]
        if not len(groups[0].parameters) == len(gathered.squares) == len(trainable):
            return False
        if groups[0].lists["momentum"] is None or groups[0].lists["curvature"] is None:
            return False
        return gathered.loss is None or (gathered.loss.is_cpu and math.isfinite(gathered.loss))

    def _begin(self, groups: Sequence[GroupRows], gathered: SquareStatistics, squares_unit: float) -> None:
        """State for parameters at their first gradient: m₀ = 0, s₀ the first squares, unless it is given.

        If the mean is an average, the iterate starts at it, z − μ = 0.
        """
        new: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
        for rows in groups:
            averages = bool(self.settings["averaging"]) and can_average(rows.group)
            if rows.lists["momentum"] is None or rows.lists["curvature"] is None:
                for p in rows.parameters:
                    refuse_other_sizes(rows.group, p, {"squares": gathered.squares[id(p)]})
                for p, own in zip(rows.parameters, rows.states, strict=True):
                    if "momentum" not in own:
                        own["momentum"] = torch.zeros_like(widen(p.detach()))
                    if "curvature" not in own:
                        own["curvature"] = gathered.squares[id(p)] * squares_unit
                    if averages and "offset" not in own:
                        own["offset"] = torch.zeros_like(p.detach())
            for p, own in zip(rows.parameters, rows.states, strict=True) if rows.relative else ():
                if SCALE not in own or not own[SCALE][2]:
                    assert p.grad is not None
                    new.append((own, p, p.grad * gathered.gradient_unit))
        if new:
            self._set_scales(*zip(*new, strict=True))

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
        size = {"data_size": data_size, "augmentation": augmentation}
        samples = {"mc_samples": mc_samples, "mc_slices": mc_slices, "vectorized": vectorized}
        start = {"initial_curvature": initial_curvature, "initial_precision": initial_precision}
        rest = {"averaging": averaging, "reduction": reduction, "seed": seed}
        ranks = {"shared_noise": shared_noise, "sharded": sharded, "mc_groups": mc_groups}
        settings = {**size, **samples, **start, **rest, **ranks}
        group = {"momentum": momentum, "ema_rate": ema_rate}
        given = Given(lr, damping, tempering, prior_precision, initial_precision is not None)
        super().__init__(params, given, prior, group, settings)

    def _draw(self, draw: int) -> int:
        slices: int = self.settings["mc_slices"]
        if slices > 1:
            self._stacked = self._stacks(draw, slices)
            return slices
        for rows in self._drawn():
            curvatures, offsets = rows.lists.values()
            if rows.places:
                noise.sample_all_(
                    *(rows.parameters, curvatures, rows.scale, rows.shift),  # type: ignore[arg-type]
                    *(self.settings["seed"], draw, rows.places),
                    backup=self._backup,
                    offsets=offsets,
                )
            elif offsets is not None:
                place_iterates(self._backup, rows.parameters, offsets)
        return 1

    def _stacks(self, draw: int, samples: int) -> StackedWeights:
        """The samples number draw, draw + 1, … side by side; the parameters keep the mean."""
        stacks: dict[int, Tensor] = {}
        for rows in self._drawn():
            curvatures, offsets = rows.lists.values()
            if not rows.places:  # the same for all samples
                assert offsets is not None
                place_iterates(self._backup, rows.parameters, offsets)
                continue
            assert curvatures is not None
            means = [p.detach() for p in rows.parameters]
            if offsets is not None:
                means = list(torch._foreach_add(means, list(offsets)))
            own = [mean.new_empty((samples, *mean.shape)) for mean in means]
            numbers = curvatures, rows.scale, rows.shift
            sample_stacks_(own, means, *numbers, self.settings["seed"], draw, rows.places)
            stacks |= {id(p): row for p, row in zip(rows.parameters, own, strict=True)}
        return StackedWeights(stacks, samples)

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """All K samples by one run of the closure under torch.vmap; K·M examples of one mean loss."""
        parameters, samples = self._trainable(), self.settings["mc_samples"]
        try:  # parameters without noise may be moved
            stacks = self._stacks(self._stream(), samples)
            for p in parameters:
                p.grad = None
            block = watching(self._subjects(parameters), "mean", transform=stacks, samples=samples)
            with uncompiled(block) as stats:
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
        size = {"data_size": data_size, "augmentation": augmentation}
        samples = {"mc_samples": 1, "mc_slices": 1, "vectorized": False}
        start = {"initial_curvature": initial_curvature, "initial_precision": initial_precision}
        rest = {"averaging": averaging, "reduction": reduction, "seed": seed}
        ranks = {"shared_noise": False, "sharded": sharded, "mc_groups": mc_groups}
        settings = {**size, **samples, **start, **rest, **ranks}
        group = {"momentum": momentum, "ema_rate": ema_rate}
        given = Given(lr, damping, tempering, prior_precision, initial_precision is not None)
        super().__init__(params, given, prior, group, settings)

    def _draw(self, draw: int) -> int:
        """The iterate is the sample."""
        for rows in self._drawn():
            if rows.lists["offset"] is not None:
                place_iterates(self._backup, rows.parameters, rows.lists["offset"])
        return 1
