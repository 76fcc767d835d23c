"""IVON: improved variational online Newton (Shen et al. 2024). The curvature is read off noise and gradient.

With N the data size times ρ, δ̃ = τδ/N, and samples w = μ + σ·ε of the posterior, σ² = τ / (N(h + δ̃)):

    ĝ = mean gradient,  ĥ = ĝ·(w − μ)/σ²          each averaged over K samples
    m ← b₁·m + (1 − b₁)·ĝ
    h ← b₂·h + (1 − b₂)·ĥ + ½(1 − b₂)²·(h − ĥ)²/(h + δ̃)
    μ ← μ − α·(m/(1 − b₁ᵗ) + δ̃(μ − μ₀)) / (h + δ̃)          t counts the updates of the parameter

E[ĥ] is the curvature of the expected loss (Price), and the last term of h keeps h + δ̃ positive. No per-example
gradients are needed: a step is one ordinary backward pass a sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.contribution import widen
from credo.errors import InvalidType
from credo.kernels import ivon as kernel
from credo.kernels import noise
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer
from credo.optim.beliefs import Belief
from credo.optim.diagnostics import Part, part_of
from credo.optim.eyes import Onlooker
from credo.optim.gathered_tables import GatheredProducts
from credo.optim.gathering import Gathered
from credo.optim.offsets import OffsetKeeper
from credo.optim.priors import take_prior
from credo.optim.shards import WIDTHS, ElementShards, whole
from credo.posterior import DiagonalPosterior, Posterior


@final
class IVON(BayesianOptimizer):
    """A posterior at the price of Adam.

        optimizer = credo.IVON(model, data_size=len(train_set))
        loss = optimizer.step(closure)
        posterior = optimizer.posterior()

    params: as for `VOGN`; a group may have its own lr, betas, prior_precision, tempering, clip_radius, deterministic.
    betas: weigh the *old* momentum and curvature, as Adam's do.
    prior_precision: δ. IVON's weight decay is δ̃ = τδ/N, so δ = weight_decay·N/τ.
    initial_curvature: h₀, where the curvature starts; it moves slowly, so lr/(h₀ + δ̃) is the step for a long while.
        Deterministic parameters (normalisation layers) keep it, and move like SGD with momentum at lr/h₀.
    clip_radius: bounds every weight's step to lr·clip_radius.
    shared_noise, sharded: as for `VOGN`, among several processes.
    """

    _kept = ("_offsets",)
    _gathered: GatheredProducts
    _shards: ElementShards

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.2,  # α
        *,
        data_size: float,  # N
        betas: tuple[float, float] = (0.9, 0.99999),  # b₁, b₂
        prior_precision: float = 1.0,  # δ
        prior: Posterior | None = None,
        tempering: float = 1.0,  # τ
        mc_samples: int = 1,  # K
        augmentation: float = 1.0,  # ρ
        initial_curvature: float = 0.5,  # h₀
        clip_radius: float | None = None,  # ξ
        reduction: str = "mean",
        seed: int = 0,
        shared_noise: bool = False,
        sharded: bool = False,
    ):
        defaults = {
            "lr": arguments.learning_rate(lr),  # α
            "betas": betas,  # b₁, b₂
            "prior_precision": prior_precision,  # δ
            "tempering": tempering,  # τ
            "clip_radius": clip_radius,  # ξ
        }
        settings = {
            "data_size": arguments.whole("data_size", data_size, 1),  # N
            "augmentation": arguments.number("augmentation", augmentation, 1, math.inf),  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "initial_curvature": arguments.number(
                "initial_curvature", initial_curvature, 0, math.inf, open_low=True
            ),
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
        }
        self._offsets = OffsetKeeper()
        super().__init__(params, defaults, settings)
        if prior is not None:
            take_prior(self, prior)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        if not isinstance(group["betas"], (tuple, list)) or len(group["betas"]) != 2:
            raise InvalidType(f"betas must be a pair of numbers, got {group['betas']!r}.")
        for beta in group["betas"]:
            arguments.number("betas", beta, 0, 1, open_high=True)
        arguments.number("prior_precision", group["prior_precision"], 0, math.inf)
        arguments.number("tempering", group["tempering"], 0, 1, open_low=True)
        if group["clip_radius"] is not None:
            arguments.number("clip_radius", group["clip_radius"], 0, math.inf, open_low=True)

    # Blocks

    @contextmanager
    def _sample(self, parameters: list[Tensor]) -> Iterator[Onlooker]:
        """The weights are a sample, in place; on the way back to the mean the products are taken."""
        eyes = Onlooker(self._subjects(parameters), self.settings["reduction"])
        beliefs = self._uncertain()
        uncertain = [b.parameter for b in beliefs]
        products = self._gathered.table
        with self._offsets.in_place(uncertain, lambda means: self._draw(beliefs, means), products), eyes:
            yield eyes
        self.counters["draws"] += 1

    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_in_turn(closure)

    def _nothing_gathered(self) -> GatheredProducts:
        return GatheredProducts()

    def _uncertain(self) -> list[Belief]:
        with self._shards.drawing(self):
            return [b for b in self.beliefs() if not b.deterministic]

    def _draw(self, beliefs: list[Belief], means: list[Tensor]) -> None:
        """One call for each (τ, δ̃) there is."""
        alike: dict[tuple[float, float | None], list[int]] = {}
        for k, b in enumerate(beliefs):
            alike.setdefault((b.scale, None if isinstance(b.shrinkage, Tensor) else b.shrinkage), []).append(
                k
            )
        for (scale, shift), places in alike.items():
            noise.sample_all_(
                [beliefs[k].parameter.detach() for k in places],
                [beliefs[k].curvature for k in places],  # type: ignore[misc]
                scale,
                [beliefs[k].shrinkage for k in places] if shift is None else shift,  # type: ignore[misc]
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
        for group in self.param_groups:
            alike: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                reached = p.requires_grad and p.grad is not None
                if reached and (group["deterministic"] or id(p) in gathered.table):
                    alike.setdefault(self._count(p), []).append(p)
            for step, ready in alike.items():
                self._update_some(group, step, ready, gathered, unit / gradient_scale, unit / squares_scale)
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
        states = [self._moved_state(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        priors = [self._shrinkage(group, p) for p in parameters]
        numbers = kernel.Settings(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=1.0 if group["deterministic"] else group["betas"][1],
            correction=1 / (1 - group["betas"][0] ** step),
            radius=math.inf if group["clip_radius"] is None else group["clip_radius"],
            gradient_unit=gradient_unit,
            product_unit=product_unit * self.data_size / group["tempering"],  # 1/σ² = (N/τ)(h + δ̃)
        )
        kernel.ivon_all_(
            [p.detach() for p in parameters],
            [state["momentum"] for state in states],
            [state["curvature"] for state in states],
            gradients,
            [gathered.table.get(id(p), gradient) for p, gradient in zip(parameters, gradients, strict=True)],
            priors if isinstance(priors[0], Tensor) else priors[0],  # type: ignore[arg-type]
            [state["prior_mean"] for state in states] if "prior_mean" in states[0] else None,
            numbers,
        )

    def _count(self, p: Tensor) -> int:
        """t, the number of this update of the parameter."""
        state = self._moved_state(p)
        state["step"] += 1
        return int(state["step"])

    # State

    def _moved_state(self, p: Tensor) -> dict[str, Tensor]:
        """m, h and t of a parameter, on its device and as wide as it is; there from the first call on."""
        state, wide = self.state[p], widen(p.detach())
        if "curvature" not in state:
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(wide)
            state["curvature"] = torch.full_like(wide, self.settings["initial_curvature"])
        for name, value in state.items():
            if name != "step" and (value.device, value.dtype) != (wide.device, wide.dtype):
                state[name] = value.to(wide)
        return state  # type: ignore[no-any-return]

    def _shrinkage(self, group: dict[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ = τδ/N, a number or, under a posterior as prior, one a weight; none for normalisation layers."""
        if group["deterministic"]:
            return 0.0
        precision: float | Tensor = self.state[p].get("prior_precision", group["prior_precision"])
        unit: float = group["tempering"] / self.data_size
        return precision * unit

    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter with what is known of it, in order."""
        names, total = self.names(), self.data_size
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    curvature, shrinkage = self._moved_state(p)["curvature"], self._shrinkage(group, p)
                    numbers = 0.0, group["tempering"], total, group["deterministic"]
                    yield Belief(names[id(p)], p, curvature, shrinkage, *numbers)

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
            "step": self.counters["step"],
        }
        return DiagonalPosterior(mean, variance, metadata)

    @whole(WIDTHS)
    def curvature(self) -> dict[str, Tensor]:
        """h by name; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}
