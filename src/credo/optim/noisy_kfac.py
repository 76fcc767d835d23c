"""Noisy K-FAC: the variational K-FAC (Zhang et al. 2018; Osawa et al. 2019, appendix A).

The update is the one in `kronecker_base`; gradients and factors are taken at samples of the posterior

    [W b] = M + √(τ/N)·R E Cᵀ,   E standard normal,   RRᵀ = (G + √γ/π)⁻¹,  CCᵀ = (A + π√γ)⁻¹

(or, with damping_form="eigen", M + √(τ/N)·V (E / √(g aᵀ + γ)) Uᵀ in the eigenbases), γ standing for δ̃ + γ.
"""

import math
from typing import Any, final

import torch
from torch import Tensor

from credo.kernels import noise
from credo.optim.beliefs import Belief
from credo.optim.kronecker_base import KroneckerOptimizer
from credo.optim.kronecker_layers import KroneckerLayer
from credo.posterior import Posterior


@final
class NoisyKFAC(KroneckerOptimizer):
    """VOGN's sibling whose posterior knows how the weights of a layer go together.

        optimizer = credo.NoisyKFAC(model, data_size=len(train_set))
        loss = optimizer.step(closure)          # or: with optimizer.sampled(): ...; optimizer.step()
        posterior = optimizer.posterior()       # a KroneckerPosterior

    Linear layers and convolutions have Kronecker factors; everything else, and layers that are used more than once, a
    diagonal from exact squared gradients. A layer takes its numbers from the group of its weight.

    params: as for `VOGN`; a group may have its own lr, momentum, ema_rate, prior_precision, damping, tempering,
        deterministic.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr, damping, tempering, prior_precision: None, chosen for each tensor (docs/defaults.md).
    momentum: β₁, as in SGD.
    ema_rate: weighs the *new* factors.
    mc_samples: K weight samples a step, each on the whole minibatch.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of the samples; the global generator is not used.
    mc_groups: among several processes, as for `VOGN`.
    prior: a posterior to start from. Its mean and variances pull the mean, weight by weight; in the damping of a
        layer stands the average of its precisions.
    damping_form: "eigen" adds δ̃ + γ to the product of the factors, exactly. "pi", the paper's, shares it between the
        two: cheaper (Cholesky factors instead of eigenvectors), calmer at large steps, and a narrower posterior.
    factor_interval, inverse_interval: how many steps factors and inverses are kept for. Steps without a refresh are
        ordinary backward passes.
    fisher: "empirical" takes the data's labels. "true" draws labels from the model, which `observe(outputs)` shows.
    sharing: how positions of one example (tokens, places) count, "expand" or "reduce".
    shared_noise: among several processes, the same samples on all ranks instead of each rank's own.
    sharded: among several processes, each layer's factors, inverses and momentum are kept by one rank only; samples and
        `posterior`, `factors` and `state_dict` are then taken by all ranks together (docs/distributed.md).
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
        damping_form: str = "eigen",
        tempering: float | None = None,  # τ
        mc_samples: int = 1,  # K
        augmentation: float = 1.0,  # ρ
        factor_interval: int = 10,  # T_f
        inverse_interval: int = 100,  # T_i
        fisher: str = "empirical",
        sharing: str = "expand",
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
            damping_form=damping_form,
            tempering=tempering,
            mc_samples=mc_samples,
            augmentation=augmentation,
            factor_interval=factor_interval,
            inverse_interval=inverse_interval,
            fisher=fisher,
            sharing=sharing,
            reduction=reduction,
            seed=seed,
            shared_noise=shared_noise,
            sharded=sharded,
            mc_groups=mc_groups,
        )

    def _draw(self, draw: int) -> None:
        if self._shards.sharded:
            self._draw_for_all(self.counters["draws"])
        else:
            self._draw_own_layers(draw)
        entries = self._entries()
        for belief in self.beliefs():
            if belief.curvature is not None and not belief.deterministic:
                self._draw_rest(belief, entries[belief.name][0], draw)

    def _draw_own_layers(self, draw: int) -> None:
        for layer in self.own_layers():
            if not layer.group["deterministic"]:
                self._draw_layer(layer, draw)

    @torch.no_grad()
    def _draw_for_all(self, number: int) -> None:
        """Each rank draws its own layers for all ranks, and they swap: the same samples as without sharding."""
        members = self._shards.members(self)
        own = members[self._world.rank]
        means, given = [p.detach().clone() for p in own], []
        for rank in range(self._world.size):
            for p, mean in zip(own, means, strict=True):
                p.copy_(mean)
            self._draw_own_layers(self._stream(rank, number))
            given.append([p.detach().clone() for p in own])
        self._world.swap_(given, members)

    def _uncertain(self) -> list[KroneckerLayer]:
        """A rank without examples of its own draws its layers for the others all the same."""
        self._follow_freezing()
        while self._shards.sharded and self._shards.draws < self.settings["mc_samples"]:
            number = self.counters["draws"] + self._shards.draws
            with self._keeper:
                self._keeper.keep(self._trainable())
                self._draw_for_all(number)
            self._shards.draws += 1
        return []

    def _draw_layer(self, layer: KroneckerLayer, draw: int) -> None:
        root = layer.root(self.settings["damping_form"])
        standard = torch.empty(layer.shape, dtype=root.rows.dtype, device=root.rows.device)
        noise.normal_(standard, self.settings["seed"], draw, layer.place)
        width = math.sqrt(layer.tempering / self.data_size)
        for p, part in zip(layer.members, layer.unpacked(root.noise(standard)), strict=True):
            p.add_(part.to(p.dtype), alpha=width)

    def _draw_rest(self, belief: Belief, place: int, draw: int) -> None:
        assert belief.curvature is not None
        shift = belief.shrinkage + belief.damping
        seed = self.settings["seed"]
        noise.sample_(belief.parameter.detach(), belief.curvature, belief.scale, shift, seed, draw, place)
