"""The update that K-FAC and Noisy K-FAC share: Kronecker factors for layers, squares for the rest.

With N the data size times ρ, δ̃ = τδ/N, and a layer's [W b] as one matrix:

    Â = mean of aaᵀ,  Ĝ = mean of ggᵀ                    a its inputs, g the gradients of its outputs; every T_f steps
    A ← (1 − β₂)A + β₂Â,   G ← (1 − β₂)G + β₂Ĝ
    H⁻¹ = (A ⊗ G + δ̃ + γ)⁻¹                              damped in one of two ways, see `inverses`; every T_i steps
    m ← β₁m + ĝ + δ̃(μ − μ₀)
    μ ← μ − α·H⁻¹m
    Cov = (τ/N)·H⁻¹

Everything without Kronecker factors has s, the mean of its squared gradients, in the place of A ⊗ G.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.factors import SHARINGS
from credo.curvature.kronecker import layer_name
from credo.errors import InvalidValue, UnsupportedOperation
from credo.optim import arguments
from credo.optim.beliefs import Belief
from credo.optim.factor_blocks import FactorOptimizer, is_due
from credo.optim.gathered_factors import GatheredFactors
from credo.optim.gathering import Gathered
from credo.optim.inverses import FORMS
from credo.optim.kronecker_layers import KroneckerLayer, ensure_momentum, forget, forget_bias, learn
from credo.optim.priors import take_prior
from credo.posterior import KroneckerPosterior, Layer, Posterior, Root


class KroneckerOptimizer(FactorOptimizer):
    """The state and the update; whether a block holds a sample or the mean is left to the method."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        data_size: float,
        momentum: float,
        ema_rate: float,
        prior_precision: float,
        prior: Posterior | None,
        damping: float,
        damping_form: str,
        tempering: float,
        mc_samples: int,
        augmentation: float,
        factor_interval: int,
        inverse_interval: int,
        fisher: str,
        sharing: str,
        reduction: str,
        seed: int,
    ):
        defaults = {
            "lr": arguments.learning_rate(lr),  # α
            "momentum": momentum,  # β₁
            "ema_rate": ema_rate,  # β₂
            "prior_precision": prior_precision,  # δ
            "damping": damping,  # γ
            "tempering": tempering,  # τ
        }
        settings = {
            "data_size": arguments.whole("data_size", data_size, 1),  # N
            "augmentation": arguments.number("augmentation", augmentation, 1, math.inf),  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "factor_interval": arguments.whole("factor_interval", factor_interval, 1),  # T_f
            "inverse_interval": arguments.whole("inverse_interval", inverse_interval, 1),  # T_i
            "damping_form": arguments.option("damping_form", damping_form, FORMS),
            "fisher": arguments.option("fisher", fisher, ("empirical", "true")),
            "sharing": arguments.option("sharing", sharing, SHARINGS),
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "layers": {},  # weight → bias or None, by name: the layers that the backward passes have shown
            "idle": [],  # names that the loss did not reach when the factors were last refreshed
        }
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
        if (group["deterministic"] or group["prior_precision"] == 0) and group["damping"] == 0:
            raise InvalidValue(
                "zero precision: damping=0 with prior_precision=0 (normalisation layers have no prior) leaves nothing "
                "where the curvature is zero: an improper posterior. Give damping > 0."
            )

    # What is known

    @final
    def layers(self) -> list[KroneckerLayer]:
        """The layers with Kronecker factors, in the order of their weights."""
        names, bias_of = self.names(), self.settings["layers"]
        named = {names[id(p)]: (k, p, group) for k, (p, group) in enumerate(self._all())}
        return [
            self._layer(name, bias_of[name], named) for name, (_, p, _) in named.items() if name in bias_of
        ]

    def _layer(self, name: str, bias_name: str | None, named: Mapping[str, Any]) -> KroneckerLayer:
        place, weight, group = named[name]
        bias = None if bias_name is None else named[bias_name][1]
        members = [(weight, group)] if bias is None else [(weight, group), (bias, named[bias_name][2])]
        shrinkage = self._mean_shrinkage(members)
        state = self._moved_state(weight)
        return KroneckerLayer(weight, bias, (name, bias_name), group, state, place, shrinkage)

    @final
    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter outside the layers with what is known of it, in order."""
        names, inside = self.names(), self._inside_layers()
        for p, group in self._all():
            if p.requires_grad and names[id(p)] not in inside:
                numbers = group["damping"], group["tempering"], self.data_size, group["deterministic"]
                curvature = self._moved_state(p).get("curvature")
                yield Belief(names[id(p)], p, curvature, self._shrinkage(group, p), *numbers)

    def _inside_layers(self) -> set[str]:
        pairs = self.settings["layers"].items()
        return {name for pair in pairs for name in pair if name is not None}

    @final
    def _has_curvature(self, p: Tensor) -> bool:
        return "curvature" in self.state[p] or "input_factor" in self.state[p] or "in_layer" in self.state[p]

    def _all(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"]]
