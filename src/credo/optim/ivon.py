"""IVON: improved variational online Newton (Shen et al. 2024). The curvature is read off noise and gradient.

With N the data size times ρ, δ̃ = τδ/N, and samples w = μ + σ·ε of the posterior, σ² = τ / (N(h + δ̃)):

    ĝ = mean gradient,  ĥ = ĝ·(w − μ)/σ²          each averaged over K samples
    m ← b₁·m + (1 − b₁)·ĝ
    h ← b₂·h + (1 − b₂)·ĥ + ½(1 − b₂)²·(h − ĥ)²/(h + δ̃)
    μ ← μ − α·(m/(1 − b₁ᵗ) + δ̃(μ − μ₀)) / (h + δ̃)          t counts the updates of the parameter

E[ĥ] is the curvature of the expected loss (Price), and the last term of h keeps h + δ̃ positive. No per-example
gradients are needed: a step is one ordinary backward pass a sample.

ĥ is noisy, so h moves slowly, and where it starts decides. Without `initial_curvature` h is, for the first 300 updates
of a parameter, the mean of M·ĝ² so far (M the examples of a batch; the mean square of a gradient that is all noise),
half of it each weight's own and half the tensor's mean; only then does ĥ take over. α, τ and δ follow the tensor, and
μ is an average of iterates, as in VOGN (see `relative`, `iterates`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.errors import InvalidType
from credo.kernels import ivon as kernel
from credo.kernels import noise
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer
from credo.optim.beliefs import Belief
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import Part, part_of
from credo.optim.eyes import Onlooker
from credo.optim.gathered_tables import GatheredProducts
from credo.optim.gathering import Gathered
from credo.optim.iterates import Moved, follow_, place_iterates, weight
from credo.optim.offsets import OffsetKeeper
from credo.optim.plan import averages
from credo.optim.priors import take_prior
from credo.optim.relative import (
    TINY,
    TensorNumbers,
    averaging_of,
    check_relative,
    follow_gradient_,
    is_relative,
    ivon_options,
    numbers,
    share_noise,
    start_scale,
)
from credo.optim.shards import WIDTHS, ElementShards, whole
from credo.posterior import DiagonalPosterior, Posterior

STARTING = 300  # updates of a parameter during which h follows the squared gradients
INITIAL_CURVATURE = 0.5  # h₀ beside a learning rate that is given


class Drawn(NamedTuple):
    """What a block changes: parameters with noise, and those that are moved from their means to their iterates."""

    noisy: list[Belief]
    moved: Moved


@final
class IVON(BayesianOptimizer):
    """A posterior at the price of Adam.

        optimizer = credo.IVON(model, data_size=len(train_set))
        loss = optimizer.step(closure)
        posterior = optimizer.posterior()

    params: as for `VOGN`; a group may have its own lr, betas, prior_precision, tempering, clip_radius, deterministic.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    mc_samples: K weight samples a step, each on the whole minibatch.
    prior: a posterior to start from; `prior_precision` is then unused.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of the samples; the global generator is not used.
    betas: weigh the *old* momentum and curvature, as Adam's do.
    prior_precision: δ. IVON's weight decay is δ̃ = τδ/N, so δ = weight_decay·N/τ.
    lr, tempering, prior_precision: None, by a rule that follows each tensor (docs/defaults.md). With an `lr` the others
        are IVON's own: h₀ = 0.5, τ = 1, δ = 1, and no average.
    initial_curvature: h₀, where the curvature starts; it moves slowly, so lr/(h₀ + δ̃) is the step for a long while.
        Deterministic parameters (normalisation layers) keep it, and move like SGD with momentum at lr/h₀. None: from
        the first gradients, see above.
    averaging: η, the mean is over about the last 1/(η + 1) of all steps; 0: no average.
    clip_radius: bounds every weight's step to lr·clip_radius.
    shared_noise, sharded, mc_groups: as for `VOGN`, among several processes.
    """

    _kept = ("_offsets",)
    _gathered: GatheredProducts
    _shards: ElementShards

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,  # α
        *,
        data_size: float,  # N
        betas: tuple[float, float] = (0.9, 0.99999),  # b₁, b₂
        prior_precision: float | None = None,  # δ
        prior: Posterior | None = None,
        tempering: float | None = None,  # τ
        averaging: float | None = None,  # η
        mc_samples: int = 1,  # K
        augmentation: float = 1.0,  # ρ
        initial_curvature: float | None = None,  # h₀
        clip_radius: float | None = None,  # ξ
        reduction: str = "mean",
        seed: int = 0,
        shared_noise: bool = False,
        sharded: bool = False,
        mc_groups: int | None = None,
    ):
        defaults = {
            **ivon_options(lr, betas, tempering, prior_precision, initial_curvature),
            "betas": betas,  # b₁, b₂
            "clip_radius": clip_radius,  # ξ
        }
        if lr is not None and initial_curvature is None:
            initial_curvature = INITIAL_CURVATURE
        settings = {
            "data_size": arguments.whole("data_size", data_size, 1),  # N
            "augmentation": arguments.number("augmentation", augmentation, 1, math.inf),  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "initial_curvature": initial_curvature,
            "averaging": averaging_of(averaging, lr),  # η
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
            "mc_groups": arguments.groups_of_ranks(mc_groups),
        }
        if initial_curvature is not None:
            arguments.number("initial_curvature", initial_curvature, 0, math.inf, open_low=True)
        self._offsets = OffsetKeeper()
        super().__init__(params, defaults, settings)
        share_noise(self.param_groups, self.defaults)
        self.counters["likelihood"] = 0
        if prior is not None:
            take_prior(self, prior)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        if not isinstance(group["betas"], (tuple, list)) or len(group["betas"]) != 2:
            raise InvalidType(f"betas must be a pair of numbers, got {group['betas']!r}.")
        for beta in group["betas"]:
            arguments.number("betas", beta, 0, 1, open_high=True)
        check_relative(group)
        if group["clip_radius"] is not None:
            arguments.number("clip_radius", group["clip_radius"], 0, math.inf, open_low=True)

    # Blocks

    @contextmanager
    def _sample(self, parameters: list[Tensor]) -> Iterator[Onlooker]:
        """The weights are a sample, in place; on the way back to the mean the products are taken."""
        eyes = Onlooker(self._subjects(parameters), self.settings["reduction"])
        drawn = self._uncertain()
        uncertain = [b.parameter for b in drawn.noisy]
        products = self._gathered.table
        with self._keeper:
            place_iterates(self._keeper, drawn.moved)
            with (
                self._offsets.in_place(uncertain, lambda means: self._draw(drawn.noisy, means), products),
                eyes,
            ):
                yield eyes
        self.counters["draws"] += 1

    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_in_turn(closure)

    def _nothing_gathered(self) -> GatheredProducts:
        return GatheredProducts()

    def _uncertain(self) -> Drawn:
        with self._shards.drawing(self):
            noisy = [b for b in self.beliefs() if not b.deterministic]
            states = ((p, self.state[p]) for p in self._trainable())
            return Drawn(noisy, [(p, own["offset"]) for p, own in states if "offset" in own])

    def _draw(self, beliefs: list[Belief], means: list[Tensor]) -> None:
        """One call for the δ̃ that are numbers, and one for those that are tensors."""
        kinds = [isinstance(b.shrinkage, Tensor) for b in beliefs]
        for kind in dict.fromkeys(kinds):
            places = [k for k, other in enumerate(kinds) if other == kind]
            noise.sample_all_(
                [beliefs[k].parameter.detach() for k in places],
                [beliefs[k].curvature for k in places],  # type: ignore[misc]
                [beliefs[k].scale for k in places],
                [beliefs[k].shrinkage for k in places],  # type: ignore[arg-type]
                self.settings["seed"],
                self._stream(),
                places,
                [means[k] for k in places],
            )

    # Steps

    @torch.no_grad()
    def _update(
        self, gathered: Gathered, gradient_scale: float, squares_scale: float, loss: Tensor | None
    ) -> bool:
        assert isinstance(gathered, GatheredProducts)
        if not self._finite(gathered, loss):
            return False
        per_example = 1 if self.settings["reduction"] == "mean" else gathered.examples / gathered.samples
        unit = 1 / (gathered.samples * per_example)
        if self.counters["step"] == 0:
            self.counters["likelihood"] = self._world.largest(int(gathered.likelihood))[0]
        for group in self.param_groups:
            alike: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                reached = p.requires_grad and p.grad is not None
                if reached and (group["deterministic"] or id(p) in gathered.table):
                    alike.setdefault(self._count(group, p), []).append(p)
            for step, ready in alike.items():
                self._update_some(group, step, ready, gathered, unit / gradient_scale, unit / squares_scale)
        self._count_examples(gathered)
        return True

    def _update_some(
        self,
        group: dict[str, Any],
        step: int,
        parameters: list[Tensor],
        gathered: GatheredProducts,
        gradient_unit: float,
        product_unit: float,
    ) -> None:
        """Parameters of one group that have had the same number of updates; without noise, h stays where it is."""
        states = [self._moved_state(group, p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        examples = gathered.examples / self._repeats(gathered)
        starting = self._follow(group, step, states, parameters, gradients, gradient_unit, examples)
        own = [self._numbers_of(group, p) for p in parameters]
        priors = [self._shrinkage(group, p) for p in parameters]
        numbers = kernel.Settings(
            lr=[one.lr for one in own],
            beta1=group["betas"][0],
            beta2=1.0 if group["deterministic"] or starting else group["betas"][1],
            correction=1 / (1 - group["betas"][0] ** step),
            radius=math.inf if group["clip_radius"] is None else group["clip_radius"],
            gradient_unit=gradient_unit,
            product_unit=[
                product_unit * self.data_size / one.tempering for one in own
            ],  # 1/σ² = (N/τ)(h + δ̃)
        )
        means = [p.detach() for p in parameters]
        offsets = [state["offset"] for state in states if "offset" in state]
        iterates = list(torch._foreach_add(means, offsets)) if offsets else means
        kernel.ivon_all_(
            iterates,
            [state["momentum"] for state in states],
            [state["curvature"] for state in states],
            gradients,
            [gathered.table.get(id(p), gradient) for p, gradient in zip(parameters, gradients, strict=True)],
            priors,  # type: ignore[arg-type]
            [state["prior_mean"] for state in states] if "prior_mean" in states[0] else None,
            numbers,
        )
        if offsets:
            follow_(means, offsets, iterates, weight(self.settings["averaging"], self.counters["step"]))

    def _follow(
        self,
        group: dict[str, Any],
        step: int,
        states: list[dict[str, Tensor]],
        parameters: list[Tensor],
        gradients: list[Tensor],
        unit: float,
        examples: float,
    ) -> bool:
        """Measures ĝ, where numbers depend on it; whether h is still at its start, which it then follows too."""
        starting = self.settings["initial_curvature"] is None and step <= STARTING
        if not is_relative(group) and not starting:
            return False
        means = self._mean_squares(parameters, gradients, unit)
        for state, gradient, mean in zip(states, gradients, means, strict=True):
            if starting:
                new = (
                    gradient.to(state["curvature"].dtype)
                    .square()
                    .mul_(examples * unit**2)
                    .add_(examples * mean)
                )
                state["curvature"].lerp_(new, 1 / step)
            follow_gradient_(state[SCALE], step, mean, examples if starting else None)
        return starting

    def _mean_squares(self, parameters: list[Tensor], gradients: list[Tensor], unit: float) -> list[float]:
        """Of ĝ, tensor by tensor; of tensors that lie on several ranks in parts, of the whole."""
        norms = torch.stack([norm.double().cpu() for norm in torch._foreach_norm(gradients)])
        sizes = torch.tensor([p.numel() for p in parameters], dtype=torch.float64)
        sums = torch.stack([norms.square(), sizes])
        if self._shards.sharded:
            self._world.add_(sums)
        return [max(mean, TINY) for mean in (sums[0] * unit**2 / sums[1].clamp(min=1)).tolist()]

    def _count(self, group: dict[str, Any], p: Tensor) -> int:
        """t, the number of this update of the parameter."""
        state = self._moved_state(group, p)
        state["step"] += 1
        return int(state["step"])

    # State

    def _moved_state(self, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """m, h and t of a parameter, on its device and as wide as it is; there from the first call on."""
        state, wide = self.state[p], widen(p.detach())
        if "curvature" not in state:
            start = self.settings["initial_curvature"]
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(wide)
            state["curvature"] = torch.full_like(wide, 1.0 if start is None else start)
            if self.settings["averaging"] and averages(group):
                state["offset"] = torch.zeros_like(p.detach())
            state[SCALE] = start_scale(p, 1.0 if start is None else start)
        for name, value in state.items():
            if name not in ("step", SCALE) and (value.device, value.dtype) != (wide.device, wide.dtype):
                state[name] = value.to(wide)
        return state  # type: ignore[no-any-return]

    def _shrinkage(self, group: dict[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ = τδ/N, a number or, under a posterior as prior, one a weight; none for normalisation layers."""
        if group["deterministic"]:
            return 0.0
        own = self._numbers_of(group, p)
        precision: float | Tensor = self.state[p].get("prior_precision", own.prior_precision)
        unit: float = own.tempering / self.data_size
        return precision * unit

    def _numbers_of(self, group: dict[str, Any], p: Tensor) -> TensorNumbers:
        """α, τ and δ of one parameter."""
        scale = self._moved_state(group, p)[SCALE] if is_relative(group) else None
        return numbers(group, scale, self.data_size, self._growth())

    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter with what is known of it, in order."""
        names, total = self.names(), self.data_size
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    curvature, own = self._moved_state(group, p)["curvature"], self._numbers_of(group, p)
                    if "prior_precision" in self.state[p]:
                        own = own._replace(prior_precision=math.nan)
                    rest = own, total, group["deterministic"]
                    yield Belief(names[id(p)], p, curvature, self._shrinkage(group, p), *rest)

    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members = set(map(id, group["params"]))
        return [part_of(b) for b in self.beliefs() if id(b.parameter) in members]

    # What is believed

    @torch.no_grad()
    @whole(WIDTHS)
    def posterior(self) -> DiagonalPosterior:
        """N(μ, diag σ²)."""
        self._refuse_inside("take the posterior")
        mean = {b.name: b.parameter.detach() for b in self.beliefs()}
        variance = {b.name: b.variance() for b in self.beliefs() if not b.deterministic}
        first = self.param_groups[0]
        metadata = {
            "method": type(self).__name__,
            "data_size": self.settings["data_size"],
            "augmentation": self.settings["augmentation"],
            "tempering": first["tempering"],
            "prior_precision": first["prior_precision"],
            "noise": first["noise"],
            "step": self.counters["step"],
        }
        return DiagonalPosterior(mean, variance, metadata)

    @whole(WIDTHS)
    def curvature(self) -> dict[str, Tensor]:
        """h by name; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}
