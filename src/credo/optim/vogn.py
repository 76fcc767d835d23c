"""VOGN: variational online Gauss–Newton (Khan et al. 2018; Osawa et al. 2019, Algorithm 1).

The update is the one in `gauss_newton`; ĝ and ĥ are taken at samples w = μ + σ·ε of the posterior,
σ² = τ / (N(s + δ̃ + γ)).
"""

from typing import Any, cast, final

import torch
from torch import Tensor

from credo.curvature.many_samples import StackedWeights
from credo.kernels import noise
from credo.kernels.lists import Numbers, each, is_number
from credo.kernels.stacked_noise import sample_stacks_
from credo.optim.gauss_newton import GaussNewton, Uncertain
from credo.optim.iterates import place_iterates
from credo.optim.relative import divided
from credo.posterior import Posterior


@final
class VOGN(GaussNewton):
    r"""A drop-in for Adam that leaves a posterior behind.

        optimizer = credo.VOGN(model, data_size=len(train_set))
        loss = optimizer.step(closure)          # or: with optimizer.sampled(): ...; optimizer.step()
        posterior = optimizer.posterior()

    params: a module (its normalisation layers become deterministic), named_parameters(), parameters(), or
        parameter groups, each with its own lr, momentum, ema_rate, prior_precision, damping, tempering,
        deterministic.
    data_size: N, the number of training examples.
    lr, damping, tempering, prior_precision: None, chosen for each tensor from its weights, its squares and the first
        gradient (docs/defaults.md). A number that is given is absolute: lr is not on Adam's scale.
    averaging: η, the mean is over about the last 1/(η + 1) of all steps; 0: the last iterate. None: 8, or 0 with an lr.
    momentum: β₁, as in SGD: the sum of past gradients, not their mean.
    ema_rate: weighs the *new* squares, unlike Adam's β₂, which weighs the old ones.
    prior_precision: δ of the prior N(0, 1/δ); weight decay is δ/N.
    prior: a posterior to start from, N(μ₀, 1/P₀) with a precision a weight; `prior_precision` is then unused.
    damping: keeps steps and noise bounded where the squares are small; it is part of σ² (see `posterior`).
    tempering: the weight of the KL term, in (0, 1]; schedule it with `credo.TemperingSchedule`.
    augmentation: how many times larger the data are for being augmented; N is multiplied by it.
    mc_samples: K weight samples a step, each on the whole minibatch. With vectorized=True they are computed
        together, from a closure that returns losses without calling backward; numbers are the same.
    mc_slices: cuts the minibatch into slices, each with a weight sample of its own (the paper's scheme).
    initial_curvature: s₀. None takes the squares of the first minibatch; the first step is then at the mean.
    initial_precision: instead of s₀, where 1/σ² starts; where the prior is sharper, it starts there. Its excess over
        the prior fades as (1 − β₂)ᵗ, and what is left of it at the end counts as if the data had said it.
    seed: of the samples; the global generator is not used.
    shared_noise: among several processes, the same samples on all ranks instead of each rank's own.
    sharded: among several processes, each rank keeps and updates its part of curvature and momentum only; samples and
        `posterior`, `state_dict` and the like are then taken by all ranks together (docs/distributed.md).
    mc_groups: among several processes, as given to `credo.distributed.data_share`: ranks of a group read the same data.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
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
        super().__init__(
            params,
            lr,
            data_size=data_size,
            momentum=momentum,
            ema_rate=ema_rate,
            prior_precision=prior_precision,
            prior=prior,
            damping=damping,
            tempering=tempering,
            averaging=averaging,
            mc_samples=mc_samples,
            mc_slices=mc_slices,
            vectorized=vectorized,
            augmentation=augmentation,
            initial_curvature=initial_curvature,
            initial_precision=initial_precision,
            reduction=reduction,
            seed=seed,
            shared_noise=shared_noise,
            sharded=sharded,
            mc_groups=mc_groups,
        )

    def _draw(self, draw: int) -> None:
        seed, keeper, drawn = self.settings["seed"], self._keeper, self._uncertain()
        for plan, (curvatures, scale, shift), places in drawn.noisy:
            parameters, sampler, offsets = (
                plan.uncertain,
                plan.sampler(places, keeper),
                plan.uncertain_offsets,
            )
            if away := keeper.kept(parameters):  # since the sample before this one
                means = away.places
                noise.sample_all_(
                    parameters, curvatures, scale, shift, seed, draw, places, means=means, offsets=offsets
                )
                continue
            new = keeper.leave(parameters, sampler.rooms)
            if is_number(shift):
                sampler(scale, shift, seed, draw, new)
            else:
                noise.sample_all_(
                    parameters, curvatures, scale, shift, seed, draw, places, kept=new, offsets=offsets
                )
        place_iterates(keeper, drawn.moved)

    def _stacks(self, draw: int, samples: int) -> StackedWeights:
        drawn = self._uncertain()
        place_iterates(self._keeper, drawn.moved)  # the same for all samples
        stacks: dict[int, Tensor] = {}
        for part in drawn.noisy:
            means, offsets = [p.detach() for p in part.plan.uncertain], part.plan.uncertain_offsets
            if offsets is not None:
                means = list(torch._foreach_add(means, list(offsets)))
            own = [mean.new_empty((samples, *mean.shape)) for mean in means]
            sample_stacks_(own, means, *part.widths, self.settings["seed"], draw, part.places)
            stacks |= {id(p): stack for p, stack in zip(part.plan.uncertain, own, strict=True)}
        return StackedWeights(stacks, samples)

    def _noisy(self) -> list[Uncertain]:
        found, first = [], 0
        for group in self.param_groups:
            plan = self._plan(group)
            if plan.uncertain and not group["deterministic"]:
                own = self._numbers(group, plan.uncertain_states)
                scale = divided(own.tempering, self.data_size)
                shift = _shift(self._shrinkages(group, plan.uncertain_states, own), own.damping)
                places = range(first, first + len(plan.uncertain))
                found.append(Uncertain(plan, (plan.curvatures, scale, shift), places))
                first += len(places)
        return found


def _shift(shrinkages: Numbers | list[Tensor], damping: Numbers) -> Numbers | list[Tensor]:
    """δ̃ + γ: numbers, or under a posterior as prior a tensor for each uncertain parameter."""
    if not is_number(shrinkages):
        tensors = cast("list[Tensor]", shrinkages)
        return list(torch._foreach_add(tensors, list(each(damping, len(tensors)))))
    if isinstance(shrinkages, float) and isinstance(damping, float):
        return shrinkages + damping
    count = len(shrinkages) if isinstance(damping, float) else len(damping)  # type: ignore[arg-type]
    return [a + b for a, b in zip(each(shrinkages, count), each(damping, count), strict=True)]
