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
μ is an average of iterates, as in VOGN (see `relative`, `scales`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.rule import WIDE, widen
from credo.curvature.tracking import WatchedParameters
from credo.distributed.sharding import WIDTHS, gathered
from credo.errors import InvalidType
from credo.kernels import noise, update
from credo.kernels.tensors import Backup, TensorList, is_on_cpu
from credo.optim import arguments
from credo.optim.checkpoints import SCALE
from credo.optim.observe import GradientObserver
from credo.optim.relative import (
    TINY,
    TensorNumbers,
    averaging_of,
    can_average,
    check_relative,
    ivon_options,
)
from credo.optim.scales import (
    DiagonalOptimizer,
    follow_gradient_,
    is_relative,
    place_iterates,
)
from credo.optim.statistics import ProductStatistics, StepStatistics
from credo.posterior import DiagonalPosterior, Posterior

STARTING = 300  # updates of a parameter during which h follows the squared gradients
INITIAL_CURVATURE = 0.5  # h₀ beside a learning rate that is given


LARGEST = 1e30  # an infinite curvature would be a variance of zero


def ivon_update(
    mean: Tensor, momentum: Tensor, curvature: Tensor,  # μ, m, h
    grad: Tensor, product: Tensor, *,  # ĝ; ĝ·(w − μ)·N/τ, so that ĥ = product·(h + δ̃)
    lr: float, beta1: float, beta2: float, correction: float,  # α, b₁, b₂, 1/(1 − b₁ᵗ)
    radius: float, prior: float | Tensor, prior_mean: Tensor | None,  # of a clipped step; δ̃; μ₀, zero when None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """μ, m and h after one update. `kernels.update.ivon_` does the same in one pass; the tests hold it to this."""
    away = mean if prior_mean is None else mean - prior_mean
    total = curvature + prior
    d = (1 - beta2) * (product * total - curvature)
    momentum = beta1 * momentum + (1 - beta1) * grad
    curvature = (curvature + d + d * (d / (2 * total))).clamp(max=LARGEST)
    step = (correction * momentum + prior * away) / (curvature + prior)
    return mean - lr * step.clamp(-radius, radius), momentum, curvature


@final
class IVON(DiagonalOptimizer):
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

    _statistics = ProductStatistics
    _gathered: ProductStatistics
    _samples: tuple[TensorList, Backup]  # the parameters that are a sample in this block, and where μ or z is

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
            "data_size": data_size,
            "augmentation": augmentation,
            "mc_samples": mc_samples,
            "initial_curvature": initial_curvature,
            "averaging": averaging_of(averaging, lr),
            "reduction": reduction,
            "seed": seed,
            "shared_noise": shared_noise,
            "sharded": sharded,
            "mc_groups": mc_groups,
        }
        if initial_curvature is not None:
            arguments.number("initial_curvature", initial_curvature, 0, math.inf, open_low=True)
        super().__init__(params, defaults, settings, prior)

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

    def _draw(self, draw: int) -> int:
        """Around the iterates; one call for the δ̃ that are numbers, and one for those that are tensors."""
        groups = self._drawn()
        pairs = [pair for rows in groups for pair in zip(rows.parameters, rows.states, strict=True)]
        moved = [(p, own["offset"]) for p, own in pairs if "offset" in own]
        first = self.param_groups[0]
        place_iterates(self._backup, self._list(first, "moved", [p for p, _ in moved]), [z for _, z in moved])
        noisy = [rows for rows in groups if rows.places]
        weights = self._list(first, "sample", [p for rows in noisy for p in rows.parameters])
        backup = self._backup.keep(weights)
        means, self._samples = backup.places, (weights, backup)  # z where there is an average
        kinds = [isinstance(rows.shift[0], Tensor) for rows in noisy]
        for kind in dict.fromkeys(kinds):
            own = [rows for rows, other in zip(noisy, kinds, strict=True) if other == kind]
            places = [k for rows in own for k in rows.places]
            noise.sample_all_(
                [weights[k].detach() for k in places],
                [p for rows in own for p in rows.lists["curvature"] or ()],
                [scale for rows in own for scale in rows.scale],
                [shift for rows in own for shift in rows.shift],  # type: ignore[arg-type]
                *(self.settings["seed"], draw, places),
                [means[k] for k in places],
                starts=None if weights.starts is None else [weights.starts[k] for k in places],
            )
        return 1

    @contextmanager
    def _observe(self, watched: WatchedParameters) -> Iterator[GradientObserver]:
        """On the way back to the mean the products ĝ·(w − μ) are taken."""
        with GradientObserver(watched, self.settings["reduction"]) as seen:
            yield seen
        if not self._reducer.alone:
            self._reducer.collect(seen, self._gathered.localise)
        weights, backup = self._samples
        table, memory = (
            self._gathered.table,
            self._list(self.param_groups[0], "product", self._products(weights)),
        )
        products = [table.get(id(p), own) for p, own in zip(weights, memory, strict=True)]
        reached = [k for k, p in enumerate(weights) if p.grad is not None]
        for add in (True, False):
            found = [k for k in reached if (id(weights[k]) in table) == add]
            gradients = [weights[k].grad for k in found]
            rows = [weights[k].detach() for k in found], [backup.places[k] for k in found]
            update.restore_(*rows, [products[k] for k in found], gradients, add)  # type: ignore[arg-type]
        table.update({id(weights[k]): products[k] for k in reached})
        if len(reached) == len(weights):
            self._backup.forget(backup)

    def _products(self, weights: TensorList) -> list[Tensor]:
        """Memory for the products; kept between steps, because fresh pages are slow."""
        known = self._lists.get((id(self.param_groups[0]), "product"), ())
        kinds = [(widen(p.detach()), p) for p in weights]
        if len(known) == len(kinds) and all(
            (m.shape, m.dtype, m.device, m.stride()) == (w.shape, w.dtype, w.device, w.stride())
            for m, (w, _) in zip(known, kinds, strict=True)
        ):
            return list(known)
        return [torch.empty_like(wide) for wide, _ in kinds]

    # Steps

    @torch.no_grad()
    def _update(self, gathered: StepStatistics) -> bool:
        assert isinstance(gathered, ProductStatistics)
        if not all(map(is_on_cpu, gathered.table.values())):
            self._ask_for_norms(gathered, self._trainable())
        if not self._finite(gathered):
            return False
        unit = gathered.gradient_unit
        product_unit = unit * gathered.gradient_scale / gathered.squares_scale
        for group in self.param_groups:
            alike: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                reached = p.requires_grad and p.grad is not None
                if reached and (group["deterministic"] or id(p) in gathered.table):
                    alike.setdefault(self._count(group, p), []).append(p)
            for step, ready in alike.items():
                self._update_some(group, step, ready, gathered, unit, product_unit)
        return True

    def _update_some(
        self,
        group: dict[str, Any],
        step: int,
        parameters: list[Tensor],
        gathered: ProductStatistics,
        gradient_unit: float,
        product_unit: float,
    ) -> None:
        """Parameters of one group that have had the same number of updates; without noise, h stays where it is."""
        states = [self._moved_state(group, p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        examples = gathered.examples / self._repeats(gathered)
        starting = self._follow(group, step, states, parameters, gradients, gradient_unit, examples)
        own = self._numbers(group, states)
        priors = self._shrinkages(group, states, own)
        numbers = update.IVONNumbers(
            lr=own.lr,
            beta1=group["betas"][0],
            beta2=1.0 if group["deterministic"] or starting else group["betas"][1],
            correction=1 / (1 - group["betas"][0] ** step),
            radius=math.inf if group["clip_radius"] is None else group["clip_radius"],
            gradient_unit=gradient_unit,
            product_unit=[
                product_unit * self.data_size / tau for tau in own.tempering
            ],  # 1/σ² = (N/τ)(h + δ̃)
        )
        means = [p.detach() for p in parameters]
        offsets = [state["offset"] for state in states if "offset" in state]
        update.ivon_(
            ivon_update,
            means,
            [state["momentum"] for state in states],
            [state["curvature"] for state in states],
            gradients,
            [gathered.table.get(id(p), gradient) for p, gradient in zip(parameters, gradients, strict=True)],
            priors,
            [state["prior_mean"] for state in states] if "prior_mean" in states[0] else None,
            numbers,
            offsets or None,
            gathered.weight,
        )

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
        together = starting and not any(map(is_on_cpu, gradients))
        if together:
            update.follow_squares_(
                [state["curvature"] for state in states],
                gradients,
                examples * unit**2,
                [examples * mean for mean in means],
                1 / step,
            )
        for state, gradient, mean in zip(states, gradients, means, strict=True):
            if starting and not together:
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
        if self._norms and all(id(p) in self._norms for p in parameters):
            norms = torch.tensor([self._norms[id(p)] for p in parameters], dtype=torch.float64)
        else:
            norms = torch.stack([norm.double().cpu() for norm in torch._foreach_norm(gradients)])
        sizes = torch.tensor([p.numel() for p in parameters], dtype=torch.float64)
        sums = torch.stack([norms.square(), sizes])
        self._reducer.add_parts_(sums)
        return [max(mean, TINY) for mean in (sums[0] * unit**2 / sums[1].clamp(min=1)).tolist()]

    def _count(self, group: dict[str, Any], p: Tensor) -> int:
        """t, the number of this update of the parameter."""
        state = self._moved_state(group, p)
        state["step"] += 1
        return int(state["step"])

    # State

    def _has_moved(self, p: Tensor, curvature: Tensor) -> bool:
        wide = p.dtype if p.dtype in WIDE else torch.float32
        return curvature.device != p.device or curvature.dtype is not wide

    def _shrinkages(
        self, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]], own: TensorNumbers
    ) -> list[float] | list[Tensor]:
        """δ·(τ/N), rounded in this order."""
        found = super()._shrinkages(group, states, own)
        if group["deterministic"] or isinstance(found[0], Tensor):
            return found
        size = self.data_size
        pairs = zip(own.tempering, own.prior_precision, strict=True)
        return [precision * (tempering / size) for tempering, precision in pairs]

    def _moved_state(self, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """m, h and t of a parameter, on its device and as wide as it is; there from the first call on."""
        state, wide = self.state[p], widen(p.detach())
        if "curvature" not in state:
            start = self.settings["initial_curvature"]
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(wide)
            state["curvature"] = torch.full_like(wide, 1.0 if start is None else start)
            if self.settings["averaging"] and can_average(group):
                state["offset"] = torch.zeros_like(p.detach())
            state[SCALE] = self._start_scale(p, 1.0 if start is None else start)
        for name, value in state.items():
            if name not in ("step", SCALE) and (value.device, value.dtype) != (wide.device, wide.dtype):
                state[name] = value.to(wide)
        return state  # type: ignore[no-any-return]

    # What is believed

    @torch.no_grad()
    @gathered(WIDTHS)
    def posterior(self) -> DiagonalPosterior:
        """N(μ, diag σ²)."""
        self._refuse_inside("take the posterior")
        mean = {b.name: b.parameter.detach() for b in self.beliefs()}
        variance = {b.name: b.variance() for b in self.beliefs() if not b.deterministic}
        return DiagonalPosterior(mean, variance, self._metadata("tempering", "prior_precision", "noise"))
