"""The update that K-FAC and Noisy K-FAC share: Kronecker factors for layers, squares for the rest.

With N the data size times ρ, δ̃ = τδ/N, and a layer's [W b] as one matrix:

    Â = mean of aaᵀ,  Ĝ = mean of ggᵀ               a its inputs, g the gradients of its outputs; every T_f steps
    A ← (1 − β₂)A + β₂Â,   G ← (1 − β₂)G + β₂Ĝ
    H⁻¹ = (A ⊗ G + δ̃ + γ)⁻¹                         damped in one of two ways, see `inverses`; every T_i steps
    m ← β₁m + ĝ + δ̃(μ − μ₀)
    μ ← μ − α·H⁻¹m
    Cov = (τ/N)·H⁻¹

Everything without Kronecker factors has s, the mean of its squared gradients, in the place of A ⊗ G.
"""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.factors import SHARINGS
from credo.curvature.kronecker import LayerSums, layer_name
from credo.errors import InvalidValue, UnsupportedOperation
from credo.optim import arguments
from credo.optim.checkpoints import SCALE
from credo.optim.factor_blocks import is_due
from credo.optim.gathered_factors import GatheredFactors
from credo.optim.gathering import Gathered
from credo.optim.inverses import FORMS, Inverses
from credo.optim.inversion import invert_own, invert_together
from credo.optim.kronecker_layers import SIDES, KroneckerLayer, learn_factors, learn_squares, momentum_of
from credo.optim.kronecker_state import KroneckerState
from credo.optim.priors import take_prior
from credo.optim.relative import (
    KRONECKER_DAMPING,
    Given,
    check_relative,
    follow_growth_,
    is_relative,
    measure_curvature,
    own_options,
    share_noise,
    start_scale,
    take_absolute,
)
from credo.optim.shards import whole
from credo.posterior import KroneckerPosterior, Layer, Posterior, Root


def add_gradient_(m: Tensor, gradient: Tensor, unit: float, beta1: float, pull: Tensor | None) -> None:
    """m ← β₁m + ĝ + δ̃(μ − μ₀), ĝ = unit·gradient, `pull` the last term."""
    m.mul_(beta1).add_(gradient.to(m.dtype), alpha=unit)
    if pull is not None:
        m.add_(pull)


class KroneckerOptimizer(KroneckerState):
    """The update; whether a block holds a sample or the mean is left to the method."""

    _kept = ("_inverses",)

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
        damping_form: str,
        tempering: float | None,
        mc_samples: int,
        augmentation: float,
        factor_interval: int,
        inverse_interval: int,
        fisher: str,
        sharing: str,
        reduction: str,
        seed: int,
        shared_noise: bool,
        sharded: bool,
        mc_groups: int | None,
    ):
        size = arguments.whole("data_size", data_size, 1)
        rho = arguments.number("augmentation", augmentation, 1, math.inf)
        given = Given(lr, damping, tempering, prior_precision, False, KRONECKER_DAMPING)
        defaults = {
            **given.options(),  # α, γ, τ, δ, and which of them are relative to the tensor
            "momentum": momentum,  # β₁
            "ema_rate": ema_rate,  # β₂
        }
        settings = {
            "data_size": size,  # N
            "augmentation": rho,  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "factor_interval": arguments.whole("factor_interval", factor_interval, 1),  # T_f
            "inverse_interval": arguments.whole("inverse_interval", inverse_interval, 1),  # T_i
            "damping_form": arguments.option("damping_form", damping_form, FORMS),
            "fisher": arguments.option("fisher", fisher, ("empirical", "true")),
            "sharing": arguments.option("sharing", sharing, SHARINGS),
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
            "mc_groups": arguments.groups_of_ranks(mc_groups),
            "owners": {},  # weight → rank, by name: who has a layer, if they are spread over the ranks
            "layers": {},  # weight → bias or None, by name: the layers that the backward passes have shown
            "idle": [],  # names that the loss did not reach when the factors were last refreshed
        }
        self._inverses = Inverses()
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
    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        arguments.number("momentum", group["momentum"], 0, 1, open_high=True)
        arguments.number("ema_rate", group["ema_rate"], 0, 1, open_low=True)
        arguments.number("damping", group["damping"], 0, math.inf)
        check_relative(group)
        if (group["deterministic"] or group["prior_precision"] == 0) and group["damping"] == 0:
            raise InvalidValue(
                "zero precision: damping=0 with prior_precision=0 (normalisation layers have no prior) leaves nothing "
                "where the curvature is zero: an improper posterior. Give damping > 0."
            )

    # The update

    @final
    @torch.no_grad()
    def _update(
        self, gathered: Gathered, gradient_scale: float, squares_scale: float, loss: Tensor | None
    ) -> bool:
        assert isinstance(gathered, GatheredFactors)
        if not self._finite(gathered, loss):
            return False
        mean_loss = self.settings["reduction"] == "mean"
        per_example = 1 if mean_loss else gathered.examples / gathered.samples
        unit = 1 / (gathered.samples * per_example * gradient_scale)
        if self.counters["step"] == 0:
            self.counters["likelihood"] = self._world.largest(int(gathered.likelihood))[0]
        if gathered.fresh:
            own_labels = self.settings["fisher"] == "true"  # their loss is not the one that was scaled
            self._learn(gathered, (1.0 if own_labels else 1 / squares_scale**2) / gathered.samples)
            self._measure()
        self._follow(unit)
        self._invert(gathered.fresh)
        self._move(unit)
        self._count_examples(gathered)
        return True

    def _learn(self, gathered: GatheredFactors, unit: float) -> None:
        """The running means of factors and squares; `unit` undoes the number of samples and the loss scale."""
        entries, names = self._entries(), self.names()
        layers = {names[key]: sums for key, sums in gathered.layers.items()}
        squares = {names[key]: square for key, square in gathered.squares.items()}
        self._refuse_changes(layers, squares, entries)
        biases = {name: None if s.bias is None else names[id(s.bias)] for name, s in layers.items()}
        self.settings["layers"] = {**self.settings["layers"], **biases}
        for name, sums in layers.items():
            for member in (sums.weight, sums.bias):
                if member is not None:
                    self.state[member].pop("curvature", None)
            if self._shards.mine(self, name):
                rate, state = entries[name][2]["ema_rate"], self._moved_state(sums.weight)
                learn_factors(state, sums, rate, 1 / gathered.samples, unit)
        for name, square in squares.items():
            _, p, group = entries[name]
            learn_squares(self._moved_state(p), square, group["ema_rate"], unit)
        self.settings["idle"] = self._unknown()
        self._shards.cut_state(self)

    def _measure(self) -> None:
        """The mean curvature of each layer and of each other tensor."""
        for layer in self.own_layers():
            diagonals = [layer.state[f"{side}_factor"].diagonal(dim1=-2, dim2=-1) for side in SIDES]
            curvature = math.prod(float(diagonal.double().mean()) for diagonal in diagonals)
            measure_curvature(self._scale_of(layer.weight), curvature)
        for belief in self.beliefs():
            if belief.curvature is not None:
                measure_curvature(self._scale_of(belief.parameter), float(belief.curvature.double().mean()))

    def _follow(self, unit: float) -> None:
        """The size of the gradients, where steps are relative to it. A layer goes by its weight, its bias with it."""
        if not any(map(is_relative, self.param_groups)):
            return
        layers = [layer for layer in self.own_layers() if layer.bias is not None]
        biases = {id(layer.bias) for layer in layers}
        found = [(p, p.grad) for p in self._trainable() if id(p) not in biases and p.numel()]
        reached = [(p, gradient) for p, gradient in found if gradient is not None]
        for p, norm in zip(
            reached, torch._foreach_norm([g for _, g in reached]) if reached else (), strict=True
        ):
            follow_growth_(self._scale_of(p[0]), (float(norm) * unit) ** 2 / p[0].numel())
        for layer in layers:
            assert layer.bias is not None
            self.state[layer.bias][SCALE] = self._scale_of(layer.weight).clone()

    def _scale_of(self, p: Tensor) -> Tensor:
        """v, h̄ and a of a parameter; there from the first call on."""
        state: dict[str, Tensor] = self.state[p]
        if SCALE not in state:
            state[SCALE] = start_scale(p)
        return state[SCALE]

    def _invert(self, fresh: bool) -> None:
        due = is_due(self.counters["step"], self.settings["inverse_interval"])
        wanted = [layer for layer in self.own_layers() if due or "input_root" not in layer.state]
        if self._shards.sharded and (due or fresh):
            invert_own(self._world, wanted, self.settings["damping_form"])
        elif wanted:
            invert_together(self._world, wanted, self.settings["damping_form"])

    def _refuse_changes(
        self, layers: Mapping[str, LayerSums], squares: Mapping[str, Tensor], entries: Mapping[str, Any]
    ) -> None:
        """What cannot be learnt is refused before anything has changed."""
        if flipped := sorted(self._in_layers() & squares.keys()):
            raise UnsupportedOperation(
                f"{flipped[0]!r} had Kronecker factors and is now used more than once, or in another operation. A "
                "layer must be used alike in every step."
            )
        names = self.names()
        for name, sums in layers.items():
            bias = sums.weight if sums.bias is None else sums.bias
            if entries[name][2]["deterministic"] != entries[names[id(bias)]][2]["deterministic"]:
                raise InvalidValue(
                    f"{name!r} and its bias are one layer, but only one of them is in a group with deterministic=True. "
                    "Put both into the same group."
                )

    def _move(self, unit: float) -> None:
        """m and μ of every parameter that has a gradient and a curvature."""
        groups = self._groups()
        for belief in self.beliefs():
            p = belief.parameter
            if p.grad is None:
                continue
            if belief.curvature is None:  # met for the first time between two refreshes: one comes next
                self.settings["idle"] = [name for name in self.settings["idle"] if name != belief.name]
                continue
            m = self._add_gradient(p, groups[id(p)], unit)
            precision = belief.curvature + (belief.shrinkage + belief.damping)
            p.sub_((m / precision).mul_(self._numbers_of(groups[id(p)], p).lr))
        for layer in self.own_layers():
            self._move_layer(layer, groups, unit)

    def _move_layer(self, layer: KroneckerLayer, groups: dict[int, dict[str, Any]], unit: float) -> None:
        moved = [p for p in layer.members if p.grad is not None]
        if not moved:
            return
        for p in moved:
            self._add_gradient(p, groups[id(p)], unit)
        m = layer.packed(*(momentum_of(p, self._moved_state(p)) for p in layer.members))
        root = layer.root(self.settings["damping_form"])
        steps = layer.unpacked(self._inverses.times(layer.weight, root, m))
        for p, step in zip(layer.members, steps, strict=True):
            if p.grad is not None:
                p.sub_(step.to(p.dtype), alpha=self._numbers_of(groups[id(p)], p).lr)

    def _add_gradient(self, p: Tensor, group: dict[str, Any], unit: float) -> Tensor:
        state = self._moved_state(p)
        m, shrinkage = momentum_of(p, state), self._shrinkage(group, p)
        away = p.detach() - state["prior_mean"] if "prior_mean" in state else p.detach()
        none = not isinstance(shrinkage, Tensor) and shrinkage == 0
        assert p.grad is not None
        add_gradient_(m, p.grad, unit, group["momentum"], None if none else away * shrinkage)
        return m

    # What is believed

    @final
    @torch.no_grad()
    @whole()
    def posterior(self, *, damped: bool = True) -> KroneckerPosterior:
        """Matrix-normal layers, and N(μ, diag σ²) for the rest; what blocks draw from.

        `damped=False` leaves γ out, which is then the pure posterior, from the factors as they are now.
        """
        self._refuse_inside("take the posterior")
        self._follow_freezing()
        mean = {n: p.detach() for n, (_, p, _) in self._entries().items() if p.requires_grad}
        variance = {b.name: b.variance(damped) for b in self.beliefs() if not b.deterministic}
        layers = {
            layer_name(layer.names[0]): Layer(*layer.names, self._covariance_root(layer, damped))
            for layer in self.layers()
            if not layer.group["deterministic"]
        }
        first = self.param_groups[0]
        metadata = {
            "method": type(self).__name__,
            "data_size": self.settings["data_size"],
            "augmentation": self.settings["augmentation"],
            "tempering": first["tempering"],
            "prior_precision": first["prior_precision"],
            "damping": first["damping"],
            "noise": first["noise"],
            "damping_form": self.settings["damping_form"],
            "step": self.counters["step"],
        }
        return KroneckerPosterior(mean, layers, variance, metadata)

    def _covariance_root(self, layer: KroneckerLayer, damped: bool) -> Root:
        form = self.settings["damping_form"]
        root = layer.root(form) if damped else layer.pure_root(form)
        return Root(root.rows, root.columns, root.scale * math.sqrt(layer.tempering / self.data_size))

    @final
    @whole()
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer → (A, G), the running means; copies."""
        kinds = "input_factor", "output_factor"
        return {layer_name(v.names[0]): tuple(v.state[k].clone() for k in kinds) for v in self.layers()}  # type: ignore[misc]

    @final
    def curvature(self) -> dict[str, Tensor]:
        """s by name, of the parameters without Kronecker factors: the running mean of squared gradients; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}
