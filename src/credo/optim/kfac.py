"""K-FAC and Noisy K-FAC: Kronecker factors for layers, squares for the rest.

Martens & Grosse 2015 (Grosse & Martens 2016 for convolutions); the variational form Zhang et al. 2018, Osawa et al.
2019, appendix A. N the data size times ρ, δ̃ = τδ/N, a layer's [W b] one matrix, a its inputs, g the gradients of its
outputs:

    Â = mean of aaᵀ,  Ĝ = mean of ggᵀ               every T_f steps
    A ← (1 − β₂)A + β₂Â,   G ← (1 − β₂)G + β₂Ĝ
    H⁻¹ = (A ⊗ G + δ̃ + γ)⁻¹                         damped in one of two ways, see `kronecker`; every T_i steps
    m ← β₁m + ĝ + δ̃(μ − μ₀)
    μ ← μ − α·H⁻¹m
    Cov = (τ/N)·H⁻¹

Everything without Kronecker factors has s, the mean of its squared gradients, in the place of A ⊗ G. K-FAC takes
gradients and factors at the mean, and its posterior is a Laplace approximation; Noisy K-FAC takes them at samples

    [W b] = M + √(τ/N)·R E Cᵀ,   E standard normal,   RRᵀ = (G + √γ/π)⁻¹,  CCᵀ = (A + π√γ)⁻¹

(or, with damping_form="eigen", M + √(τ/N)·V (E / √(g aᵀ + γ)) Uᵀ in the eigenbases), γ standing for δ̃ + γ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.factors import SHARINGS
from credo.curvature.kronecker import LayerSums, layer_name
from credo.distributed.invert import SIDES
from credo.distributed.sharding import gathered
from credo.errors import InvalidValue, UnsupportedOperation
from credo.kernels import noise
from credo.kernels.tensors import is_on_cpu
from credo.optim import arguments
from credo.optim.checkpoints import SCALE
from credo.optim.kronecker import (
    FORMS,
    Inverses,
    KroneckerLayer,
    KroneckerState,
    is_due,
    learn_factors,
    learn_squares,
    momentum_of,
)
from credo.optim.relative import KRONECKER_DAMPING, Given
from credo.optim.scales import DampedOptimizer, follow_growth_, is_relative, measure_curvature
from credo.optim.statistics import LayerStatistics, StepStatistics
from credo.posterior import KroneckerPosterior, Layer, Posterior, Root


def kfac_update(
    means: Sequence[Tensor], momenta: Sequence[Tensor], grads: Sequence[Tensor],  # μ, m and gradients of W and b
    inverse: Callable[[list[Tensor]], list[Tensor]], *,  # m → H⁻¹m, for [W b] together
    lr: Sequence[float], beta1: Sequence[float],  # α, β₁
    priors: Sequence[float | Tensor], prior_means: Sequence[Tensor | None],  # δ̃; μ₀, zero when None
    unit: float = 1.0,  # ĝ = unit · grad
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """μ and m of a layer after one update; a parameter without Kronecker factors is a layer of its own."""
    away = [mu if centre is None else mu - centre for mu, centre in zip(means, prior_means, strict=True)]
    pulls = [delta * own for delta, own in zip(priors, away, strict=True)]
    rows = zip(beta1, momenta, grads, pulls, strict=True)
    new = [torch.add(beta * m, g, alpha=unit) + pull for beta, m, g, pull in rows]
    steps = zip(means, inverse(new), lr, strict=True)
    return [torch.sub(mean, step, alpha=alpha) for mean, step, alpha in steps], new


class _Kronecker(DampedOptimizer, KroneckerState):
    """The update; whether gradients and factors are taken at samples or at the mean is left to the method."""

    _kept = ("_inverses",)

    def __init__(
        self,
        params: Any,
        given: Given,
        prior: Posterior | None,
        group: dict[str, Any],
        settings: dict[str, Any],
    ):
        """`group` are further options of a parameter group, `settings` hold for all."""
        for name in ("factor_interval", "inverse_interval"):  # T_f, T_i
            settings[name] = arguments.whole(name, settings[name], 1)
        allowed = {"damping_form": FORMS, "fisher": ("empirical", "true"), "sharing": SHARINGS}
        for name, options in allowed.items():
            settings[name] = arguments.option(name, settings[name], options)
        # By name: weight → the rank that has the layer, if they are spread; weight → bias or None, the layers that
        # backward passes have shown; and what the loss did not reach when the factors were last refreshed.
        settings |= {"owners": {}, "layers": {}, "idle": []}
        self._inverses = Inverses()
        super().__init__(params, {**given.options(), **group}, settings, prior)

    # The update

    @final
    @torch.no_grad()
    def _update(self, gathered: StepStatistics) -> bool:
        assert isinstance(gathered, LayerStatistics)
        if not all(map(is_on_cpu, self.param_groups[0]["params"])) and any(
            map(is_relative, self.param_groups)
        ):
            self._ask_for_norms(gathered, self._trainable())
        if not self._finite(gathered):
            return False
        unit = gathered.gradient_unit
        if gathered.fresh:
            own_labels = self.settings["fisher"] == "true"  # their loss is not the one that was scaled
            self._learn(gathered, (1.0 if own_labels else 1 / gathered.squares_scale**2) / gathered.samples)
            self._measure()
        self._follow(unit)
        layers = self.own_layers()
        self._invert(layers, gathered.fresh)
        self._move(layers, unit)
        return True

    def _learn(self, gathered: LayerStatistics, unit: float) -> None:
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
            if self._reducer.mine(self, name):
                rate, state = entries[name][2]["ema_rate"], self._moved_state(sums.weight)
                learn_factors(state, sums, rate, 1 / gathered.samples, unit)
        for name, square in squares.items():
            _, p, group = entries[name]
            learn_squares(self._moved_state(p), square, group["ema_rate"], unit)
        self.settings["idle"] = self._unknown()
        self._reducer.cut_state(self)

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
        reached = [(p, g) for p, g in found if g is not None]
        norms: Sequence[Any] = self._read_norms(reached) if self._norms else ()
        norms = norms or (torch._foreach_norm([g for _, g in reached]) if reached else ())
        for (p, _), norm in zip(reached, norms, strict=True):
            follow_growth_(self._scale_of(p), (float(norm) * unit) ** 2 / p.numel())
        for layer in layers:
            assert layer.bias is not None
            self.state[layer.bias][SCALE] = self._scale_of(layer.weight).clone()

    def _scale_of(self, p: Tensor) -> Tensor:
        """v, h̄ and a of a parameter; there from the first call on."""
        state: dict[str, Tensor] = self.state[p]
        if SCALE not in state:
            state[SCALE] = self._start_scale(p)
        return state[SCALE]

    def _invert(self, layers: Sequence[KroneckerLayer], fresh: bool) -> None:
        due = is_due(self.counters["step"], self.settings["inverse_interval"])
        wanted = [layer for layer in layers if due or "input_root" not in layer.state]
        if wanted or (self._reducer.sharded and (due or fresh)):
            self._reducer.invert(wanted, self.settings["damping_form"])

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

    def _move(self, layers: Sequence[KroneckerLayer], unit: float) -> None:
        """m and μ of every parameter that has a gradient and a curvature."""
        groups = self._groups()
        for belief in self.beliefs():
            p = belief.parameter
            if p.grad is None:
                continue
            if belief.curvature is None:  # met for the first time between two refreshes: one comes next
                self.settings["idle"] = [name for name in self.settings["idle"] if name != belief.name]
                continue
            precision = belief.curvature + (belief.shrinkage + belief.damping)
            lr = self._numbers_of(groups[id(p)], p).lr
            self._move_together([p], groups, unit, partial(_scaled, precision, lr), [1.0])
        for layer in layers:
            self._move_layer(layer, groups, unit)

    def _move_layer(self, layer: KroneckerLayer, groups: dict[int, dict[str, Any]], unit: float) -> None:
        moved = [p for p in layer.members if p.grad is not None]
        if not moved:
            return
        root = layer.root(self.settings["damping_form"])

        def inverse(momenta: list[Tensor]) -> list[Tensor]:
            new = dict(zip(map(id, moved), momenta, strict=True))
            known = [momentum_of(p, self.state[p]) for p in layer.members]
            # A parameter without a gradient has its old momentum. A model may have changed its dtype since.
            own = [new.get(id(p), m).to(m.dtype) for p, m in zip(layer.members, known, strict=True)]
            m = layer.packed(*own)
            steps = layer.unpacked(self._inverses.times(layer.weight, root, m))
            return [s.to(p.dtype) for p, s in zip(layer.members, steps, strict=True) if p.grad is not None]

        rates = [self._numbers_of(groups[id(p)], p).lr for p in moved]
        self._move_together(moved, groups, unit, inverse, rates)

    def _move_together(
        self,
        parameters: list[Tensor],
        groups: dict[int, dict[str, Any]],
        unit: float,
        inverse: Callable[[list[Tensor]], list[Tensor]],
        lr: list[float],
    ) -> None:
        states = [self._moved_state(p) for p in parameters]
        momenta = [momentum_of(p, state) for p, state in zip(parameters, states, strict=True)]
        means, new = kfac_update(
            [p.detach() for p in parameters],
            momenta,
            [p.grad for p in parameters if p.grad is not None],
            inverse,
            lr=lr,
            beta1=[groups[id(p)]["momentum"] for p in parameters],
            priors=[self._shrinkage(groups[id(p)], p) for p in parameters],
            prior_means=[state.get("prior_mean") for state in states],
            unit=unit,
        )
        for p, m, mean, momentum in zip(parameters, momenta, means, new, strict=True):
            p.copy_(mean)
            m.copy_(momentum)

    # What is believed

    @final
    @torch.no_grad()
    @gathered()
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
        metadata = self._metadata("tempering", "prior_precision", "damping", "noise")
        metadata["damping_form"] = self.settings["damping_form"]
        return KroneckerPosterior(mean, layers, variance, metadata)

    def _covariance_root(self, layer: KroneckerLayer, damped: bool) -> Root:
        form = self.settings["damping_form"]
        root = layer.root(form) if damped else layer.pure_root(form)
        return Root(root.rows, root.columns, root.scale * math.sqrt(layer.tempering / self.data_size))

    @final
    @gathered()
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer → (A, G), the running means; copies."""
        kinds = "input_factor", "output_factor"
        return {layer_name(v.names[0]): tuple(v.state[k].clone() for k in kinds) for v in self.layers()}  # type: ignore[misc]

    @final
    def curvature(self) -> dict[str, Tensor]:
        """s by name, of the parameters without Kronecker factors: the running mean of squared gradients; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}


def _scaled(precision: Tensor, lr: float, momenta: list[Tensor]) -> list[Tensor]:
    """α·H⁻¹m where H is a diagonal."""
    return [(m / precision).mul_(lr) for m in momenta]


@final
class KFAC(_Kronecker):
    """As `NoisyKFAC`, without noise in the weights; the arguments mean the same.

    params: as for `VOGN`: a module, named_parameters(), parameters(), or parameter groups.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr, damping, tempering, prior_precision: None, chosen for each tensor (docs/defaults.md).
    momentum, ema_rate: β₁, as in SGD, and the weight of the *new* factors.
    prior: a posterior to start from; `prior_precision` is then unused.
    damping_form: "eigen" or "pi"; fisher: "empirical" or "true"; sharing: "expand" or "reduce" (see `NoisyKFAC`).
    factor_interval, inverse_interval: how many steps factors and inverses are kept for.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of draws from the posterior and of labels; steps have no other noise.
    sharded, mc_groups: among several processes, as for `NoisyKFAC`.

    >>> import torch, credo
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = credo.KFAC(model, data_size=100)
    >>> loss = optimizer.step(lambda: (model(torch.ones(8, 2)) - 1).square().squeeze(1))
    >>> [tuple(factor.shape) for factor in optimizer.factors()[""]]
    [(3, 3), (1, 1)]
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
        damping_form: str = "eigen",
        tempering: float | None = None,  # τ
        augmentation: float = 1.0,  # ρ
        factor_interval: int = 10,  # T_f
        inverse_interval: int = 100,  # T_i
        fisher: str = "empirical",
        sharing: str = "expand",
        reduction: str = "mean",
        seed: int = 0,
        sharded: bool = False,
        mc_groups: int | None = None,
    ):
        size = {"data_size": data_size, "augmentation": augmentation, "mc_samples": 1}
        intervals = {"factor_interval": factor_interval, "inverse_interval": inverse_interval}
        factors = {"damping_form": damping_form, "fisher": fisher, "sharing": sharing}
        rest = {"reduction": reduction, "seed": seed}
        ranks = {"shared_noise": False, "sharded": sharded, "mc_groups": mc_groups}
        settings = {**size, **intervals, **factors, **rest, **ranks}
        group = {"momentum": momentum, "ema_rate": ema_rate}
        given = Given(lr, damping, tempering, prior_precision, False, KRONECKER_DAMPING)
        super().__init__(params, given, prior, group, settings)

    def _draw(self, draw: int) -> int:
        """The mean is the sample."""
        self._begin_block()
        return 1

    def _catch_up(self) -> None:
        """Nothing is drawn; but what has been frozen is noticed by a rank without examples too."""
        self._follow_freezing()


@final
class NoisyKFAC(_Kronecker):
    """VOGN's sibling whose posterior knows how the weights of a layer go together.

        optimizer = credo.NoisyKFAC(model, data_size=len(train_set))
        loss = optimizer.step(closure)          # or: with optimizer.sampled(): ...; optimizer.step()
        posterior = optimizer.posterior()       # a KroneckerPosterior

    The update of a layer is m ← β₁m + ĝ + δ̃(μ − μ₀), μ ← μ − α·H⁻¹m with H = A ⊗ G + δ̃ + γ; samples are drawn from
    N(μ, (τ/N)·H⁻¹). Implementations differ in how they damp (`damping_form`) and in what an example is (`sharing`).

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

    >>> import torch, credo
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = credo.NoisyKFAC(model, data_size=100, mc_samples=2)
    >>> loss = optimizer.step(lambda: (model(torch.ones(8, 2)) - 1).square().squeeze(1))
    >>> optimizer.posterior().dense_covariance("").shape
    torch.Size([3, 3])
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
        size = {"data_size": data_size, "augmentation": augmentation, "mc_samples": mc_samples}
        intervals = {"factor_interval": factor_interval, "inverse_interval": inverse_interval}
        factors = {"damping_form": damping_form, "fisher": fisher, "sharing": sharing}
        rest = {"reduction": reduction, "seed": seed}
        ranks = {"shared_noise": shared_noise, "sharded": sharded, "mc_groups": mc_groups}
        settings = {**size, **intervals, **factors, **rest, **ranks}
        group = {"momentum": momentum, "ema_rate": ema_rate}
        given = Given(lr, damping, tempering, prior_precision, False, KRONECKER_DAMPING)
        super().__init__(params, given, prior, group, settings)

    @torch.no_grad()
    def _draw(self, draw: int) -> int:
        self._begin_block()
        if self._reducer.sharded:
            self._draw_for_all(self.counters["draws"])
        else:
            self._draw_own_layers(draw)
        entries, seed = self._entries(), self.settings["seed"]
        for own in self.beliefs():
            if own.curvature is not None and not own.deterministic:
                shift, place = own.shrinkage + own.damping, entries[own.name][0]
                noise.sample_(own.parameter.detach(), own.curvature, own.scale, shift, seed, draw, place)
        return 1

    def _draw_own_layers(self, draw: int) -> None:
        for layer in self.own_layers():
            if not layer.group["deterministic"]:
                self._draw_layer(layer, draw)

    @torch.no_grad()
    def _draw_for_all(self, number: int) -> None:
        """Each rank draws its own layers for all ranks, and they swap: the same samples as without sharding."""
        members = self._reducer.members(self)
        own = self._reducer.own_of(members)
        means, given = [p.detach().clone() for p in own], []
        for stream in self._reducer.streams(self.settings, number):
            for p, mean in zip(own, means, strict=True):
                p.copy_(mean)
            self._draw_own_layers(stream)
            given.append([p.detach().clone() for p in own])
        self._reducer.swap_(given, members)

    def _catch_up(self) -> None:
        """A rank without examples of its own draws its layers for the others all the same."""
        self._follow_freezing()
        while self._reducer.sharded and self._reducer.draws < self.settings["mc_samples"]:
            number = self.counters["draws"] + self._reducer.draws
            try:
                self._backup.keep(self._list(self.param_groups[0], "mean", self._trainable()))
                self._draw_for_all(number)
            finally:
                self._end_block()
            self._reducer.draws += 1

    def _draw_layer(self, layer: KroneckerLayer, draw: int) -> None:
        root = layer.root(self.settings["damping_form"])
        standard = torch.empty(layer.shape, dtype=root.rows.dtype, device=root.rows.device)
        noise.normal_(standard, self.settings["seed"], draw, layer.place)
        width = math.sqrt(layer.tempering / self.data_size)
        for p, part in zip(layer.members, layer.unpacked(root.noise(standard)), strict=True):
            p.add_(part.to(p.dtype), alpha=width)
