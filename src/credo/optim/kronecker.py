"""A layer as K-FAC sees it: [W b] with the factors A (…, J, J) and G (…, O, O), and the root of their damped inverse.

    pi      (A + π√γ I)⁻¹ = CCᵀ,  (G + √γ/π I)⁻¹ = RRᵀ,  π² = mean eigenvalue of A over that of G   (the paper's)
    eigen   A = U diag(a) Uᵀ,  G = V diag(g) Vᵀ;  (A ⊗ G + γI)⁻¹ is 1/(g aᵀ + γ) in these bases      (exact)

γ stands for δ̃ + γ. The first adds √γ(πG ⊗ I + I ⊗ A/π)-like terms beside γ, so its variance is smaller; it needs
Cholesky factors only. Labels that are drawn from the model itself, for the true Fisher, are here too:
Σᵢ −log p(ŷᵢ | f(xᵢ)), ŷᵢ ~ p(· | f(xᵢ)).
"""

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.kronecker import FactorStatistics, LayerSums, watching_factors
from credo.curvature.rule import widen
from credo.curvature.tracking import WatchedParameters
from credo.distributed.agreement import Expected, layers_of_all
from credo.distributed.invert import SIDES
from credo.distributed.sharding import LayerReducer
from credo.errors import CallOrderError, InvalidType, InvalidValue
from credo.optim.checkpoints import FACTORS, SCALE
from credo.optim.diagnostics import ParameterSummary, Part, part_of
from credo.optim.observe import GradientObserver
from credo.optim.relative import TensorNumbers
from credo.optim.scales import RelativeOptimizer
from credo.optim.statistics import LayerStatistics, Observation
from credo.posterior.matrix_normal import Root, as_matrix, from_matrix

State = dict[str, Tensor]


@dataclass(frozen=True)
class KroneckerLayer:
    """[W b] with the numbers of the weight's group; `state` is the optimiser's for the weight."""

    weight: Tensor
    bias: Tensor | None
    names: tuple[str, str | None]
    group: dict[str, Any]
    state: State
    place: int  # of the weight among all parameters: the key of its noise
    shrinkage: float | Tensor  # δ̃, under a posterior as prior its mean over the layer
    damping: float  # γ
    tempering: float  # τ

    @property
    def members(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def shape(self) -> torch.Size:
        """Of [W b], or of the stack of its groups."""
        outputs, inputs = self.state["output_factor"].shape, self.state["input_factor"].shape
        return torch.Size((*outputs[:-1], inputs[-1]))

    def packed(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return as_matrix(weight, bias, self.shape)

    def unpacked(self, matrix: Tensor) -> list[Tensor]:
        """What belongs to the weight and, if there is one, to the bias."""
        parts = from_matrix(matrix, self.weight, self.bias is not None)
        return [part for part in parts if part is not None]

    def invert(self, form: str) -> None:
        """Refreshes what `root` is made of."""
        for side in SIDES:
            self.invert_side(side, form)

    def invert_side(self, side: str, form: str) -> None:
        """One of the two factors, which may be another process's work than the other one."""
        inputs, outputs = self.state["input_factor"], self.state["output_factor"]
        if form == "pi":
            shifts = pi_shifts(inputs, outputs, self.shrinkage + self.damping)
            factor, shift = (outputs, shifts[0]) if side == "output" else (inputs, shifts[1])
            self.state[f"{side}_root"] = inverse_root(factor, shift)
        else:
            basis = eigenbasis(self.state[f"{side}_factor"])
            self.state[f"{side}_root"], self.state[f"{side}_eigenvalues"] = basis

    def expect_side(self, side: str, form: str) -> None:
        """Memory for what `invert_side` gives on another process."""
        factor = self.state[f"{side}_factor"]
        self.state[f"{side}_root"] = torch.empty_like(factor, memory_format=torch.contiguous_format)
        if form != "pi":
            self.state[f"{side}_eigenvalues"] = factor.new_empty(factor.shape[:-1])

    def inverted_side(self, side: str, form: str) -> list[Tensor]:
        kinds = ["root"] if form == "pi" else ["root", "eigenvalues"]
        return [self.state[f"{side}_{kind}"] for kind in kinds]

    def root(self, form: str) -> Root:
        """Of (A ⊗ G + δ̃ + γ)⁻¹: the covariance is τ/N times it."""
        rows, columns = self.state["output_root"], self.state["input_root"]
        if form == "pi":
            return Root(rows, columns, rows.new_ones(()))
        damping = self.shrinkage + self.damping
        values = self.state["output_eigenvalues"], self.state["input_eigenvalues"]
        return Root(rows, columns, eigen_scale(*values, damping))

    def pure_root(self, form: str) -> Root:
        """The same without γ, from the factors as they are now."""
        inputs, outputs = self.state["input_factor"], self.state["output_factor"]
        if form == "pi":
            rows, columns = pi_roots(inputs, outputs, self.shrinkage)
            return Root(rows, columns, rows.new_ones(()))
        (rows, values), (columns, others) = eigenbasis(outputs), eigenbasis(inputs)
        return Root(rows, columns, eigen_scale(values, others, self.shrinkage))

    def eigenvalues(self, form: str) -> tuple[Tensor, Tensor]:
        """Of A ⊗ G and of its damped form, one for each weight, from the factors as they are now."""
        inputs, outputs = self.state["input_factor"], self.state["output_factor"]
        a, g = (torch.linalg.eigvalsh(t.double()).clamp_min(0).unsqueeze(-2) for t in (inputs, outputs))
        damping = self.shrinkage + self.damping
        if form == "eigen":
            return g.mT * a, g.mT * a + damping
        rows, columns = (t.double()[..., None, None] for t in pi_shifts(inputs, outputs, damping))
        return g.mT * a, (g.mT + rows) * (a + columns)


def learn_factors(state: State, sums: LayerSums, rate: float, input_unit: float, output_unit: float) -> None:
    """A ← (1−β₂)A + β₂Â, G likewise; the first ones are taken whole."""
    units = {"input_factor": (sums.inputs, input_unit), "output_factor": (sums.outputs, output_unit)}
    known = state.get("input_factor")
    if known is not None and known.shape != sums.inputs.shape:
        forget(state)  # the bias has been frozen or freed
    for kind, (found, unit) in units.items():
        _learn(state, kind, found, rate, unit)


def learn_squares(state: State, squares: Tensor, rate: float, unit: float) -> None:
    """s ← (1−β₂)s + β₂ĥ; the first squares are the first s."""
    _learn(state, "curvature", squares, rate, unit)


def _learn(state: State, kind: str, found: Tensor, rate: float, unit: float) -> None:
    if kind in state:
        state[kind].mul_(1 - rate).add_(found.to(state[kind].dtype), alpha=rate * unit)
    else:
        state[kind] = found * unit


def forget_bias(state: State) -> None:
    """The bias is frozen: the weights given the bias have the rest of A."""
    state["input_factor"] = state["input_factor"][..., :-1, :-1].clone()


def forget(state: State) -> None:
    for kind in FACTORS:
        state.pop(kind, None)


def momentum_of(p: Tensor, state: State) -> Tensor:
    """m, zero at first."""
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(widen(p.detach()))
    return state["momentum"]


class KroneckerState(RelativeOptimizer):
    """What K-FAC knows at any time: the layers with their factors, the other parameters with their squares.

    `settings["layers"]` says by name which weight has factors and which bias is its; the backward passes tell."""

    _gathered: LayerStatistics
    _factors: FactorStatistics | None = None  # of the block that is open, if it sees factors
    _reducer: LayerReducer
    _kind_of_reducer = LayerReducer
    _statistics = LayerStatistics

    @final
    def layers(self) -> list[KroneckerLayer]:
        """The layers with Kronecker factors, in the order of their weights."""
        entries, found = self._entries(), []
        for name, bias_name in self.settings["layers"].items():
            place, weight, group = entries[name]
            bias = None if bias_name is None else entries[bias_name][1]
            state = self._moved_state(weight)
            shrinkage = self._mean_shrinkage([entries[n][1:] for n in (name, bias_name) if n is not None])
            own = self._numbers_of(group, weight)
            numbers = shrinkage, own.damping, own.tempering
            found.append(KroneckerLayer(weight, bias, (name, bias_name), group, state, place, *numbers))
        return sorted(found, key=lambda layer: layer.place)

    @final
    def own_layers(self) -> list[KroneckerLayer]:
        """Those whose factors this rank keeps: all of them, unless they are spread over the ranks."""
        return [layer for layer in self.layers() if self._reducer.mine(self, layer.names[0])]

    @final
    def beliefs(self) -> Iterator[ParameterSummary]:
        """Every trainable parameter outside the layers with what is known of it, in order."""
        inside = self._in_layers()
        for name, (_, p, group) in self._entries().items():
            if p.requires_grad and name not in inside:
                curvature, shrinkage = self._moved_state(p).get("curvature"), self._shrinkage(group, p)
                own = self._numbers_of(group, p)
                if "prior_precision" in self.state[p]:
                    own = own._replace(prior_precision=math.nan)
                yield ParameterSummary(
                    name, p, curvature, shrinkage, own, self.data_size, group["deterministic"]
                )

    def _entries(self) -> dict[str, tuple[int, Tensor, dict[str, Any]]]:
        """Name → place among all parameters, parameter, group."""
        names, every = self.names(), [(p, g) for g in self.param_groups for p in g["params"]]
        return {names[id(p)]: (k, p, g) for k, (p, g) in enumerate(every)}

    def _groups(self) -> dict[int, dict[str, Any]]:
        return {id(p): group for group in self.param_groups for p in group["params"]}

    def _in_layers(self) -> set[str]:
        pairs = self.settings["layers"].items()
        return {name for pair in pairs for name in pair if name is not None}

    @final
    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members, form = set(map(id, group["params"])), self.settings["damping_form"]
        layers = [layer for layer in self.layers() if id(layer.weight) in members]
        rest = [part_of(b) for b in self.beliefs() if id(b.parameter) in members]
        numbers = [self._numbers_of(layer.group, layer.weight) for layer in layers]
        return [
            _part_of_layer(layer, own, form, self.data_size)
            for layer, own in zip(layers, numbers, strict=True)
        ] + rest

    @final
    def _unknown(self) -> list[str]:
        return [b.name for b in self.beliefs() if b.curvature is None]

    def _moved_state(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device."""
        state: dict[str, Tensor] = self.state[p]
        for key, value in state.items():
            if value.device != p.device and key != SCALE:
                state[key] = value.to(p.device)
        return state

    def _mean_shrinkage(self, members: list[tuple[Tensor, dict[str, Any]]]) -> float | Tensor:
        """δ̃ as the damping of a layer, which is one number: the mean over its weights."""
        total: float | Tensor = 0.0
        for p, group in members:
            own = self._shrinkage(group, p)
            total = total + (own.sum() if isinstance(own, Tensor) else own * p.numel())
        return total / sum(p.numel() for p, _ in members)

    @final
    def _follow_freezing(self) -> None:
        """A layer whose weight is frozen is none; one whose bias is frozen is the layer given that bias."""
        entries = self._entries()
        if all(entries[name][1].requires_grad for name in self._in_layers()):
            return
        with self._reducer.whole(self):  # what leaves its layer belongs to all ranks from here on
            self.settings["layers"] = dict(self._unfrozen())

    def _unfrozen(self) -> Iterator[tuple[str, str | None]]:
        for layer in self.layers():
            name, bias_name = layer.names
            if not layer.weight.requires_grad:
                forget(layer.state)
                continue
            if layer.bias is not None and not layer.bias.requires_grad:
                forget_bias(layer.state)
                layer.invert(self.settings["damping_form"])
                bias_name = None
            yield name, bias_name

    # Blocks

    @final
    @contextmanager
    def _observe(self, watched: WatchedParameters) -> Iterator[Observation]:
        with self._watch(watched) as seen:
            self._factors = seen if isinstance(seen, FactorStatistics) else None
            try:
                yield seen
                self._require_observed(seen)
            finally:
                self._factors = None
        if not seen.examples:
            self._reducer.draws -= 1  # a look, which is no part of a step

    def _begin_block(self) -> None:
        """Lets what is known of the layers follow parameters that were frozen, and puts the means away."""
        self._follow_freezing()
        self._reducer.draws += 1
        self._backup.keep(self._list(self.param_groups[0], "mean", self._trainable()))

    def _watch(self, watched: WatchedParameters) -> AbstractContextManager[Observation]:
        reduction = self.settings["reduction"]
        if not self._factors_due():
            return GradientObserver(watched, reduction)
        true = self.settings["fisher"] == "true"
        return watching_factors(watched, reduction, self.settings["sharing"], fisher=true)

    def _factors_due(self) -> bool:
        """Every T_f steps, and where a parameter has joined; not for those that the last refresh did not reach."""
        if is_due(self.counters["step"], self.settings["factor_interval"]):
            return True
        return not set(self._unknown()) <= set(self.settings["idle"])

    @final
    def observe(self, outputs: Tensor, likelihood: str = "categorical") -> None:
        """For fisher="true": shows the model's outputs, before the backward pass of the loss.

        Labels are drawn from them by the private generator and sent back once, through a graph that stays; steps at
        which no factors are due do nothing here. `likelihood`: "categorical" (logits, (M, classes)) or "gaussian"
        (means of unit variance, for half the squared error). Micro-batches are shown one by one.
        """
        if self.settings["fisher"] != "true":
            raise CallOrderError(
                "observe() is for fisher='true'; this optimiser takes the data's labels (fisher='empirical')."
            )
        if self._inside is None:
            raise CallOrderError("observe() belongs inside a sampling block or a closure, before backward.")
        check_outputs(outputs, likelihood)
        if self._factors is not None:
            key = self.settings["seed"], self._stream(), self._factors.found().examples
            generator = private_generator(*key, outputs.device)
            self._factors.observe(sampled_loss(outputs, likelihood, generator), self._trainable())

    def _require_observed(self, seen: Observation) -> None:
        if isinstance(seen, FactorStatistics) and seen.examples and not seen.found().examples:
            raise CallOrderError(
                "fisher='true' needs the model's outputs: call optimizer.observe(outputs) before loss.backward(), and "
                "let the closure call backward itself."
            )

    @final
    def _nothing_gathered(self) -> LayerStatistics:
        return LayerStatistics(expect=self._expected)

    def _expected(self, own: list[Expected]) -> list[Expected] | None:
        if not self._factors_due():
            return None
        return layers_of_all(self._reducer.world, own, self._trainable(), self.names())


def _part_of_layer(layer: KroneckerLayer, own: TensorNumbers, form: str, data_size: float) -> Part:
    """Shares by the eigenvalues of A ⊗ G; what "pi" adds beside δ̃ + γ is shared out as these are."""
    inverse = layer.root(form).variance()  # the diagonal of H⁻¹
    mean = layer.packed(*(p.detach() for p in layer.members))
    sigma = (layer.tempering / data_size * inverse).sqrt()
    curvature, total = layer.eigenvalues(form)
    rest = (total - curvature) / total
    of_prior = layer.shrinkage / (layer.shrinkage + layer.damping)
    shares = curvature / total, rest * of_prior, rest * (1 - of_prior)
    return Part(mean, sigma, own.lr * inverse, *shares, own)


def is_due(step: int, interval: int) -> bool:
    """Steps 0, T, 2T, …; and 1, 2, 4, … below T, because the first factors are of one minibatch."""
    return step % interval == 0 or (step < interval and step & (step - 1) == 0)


# Inverses

FORMS = ("pi", "eigen")


def pi_roots(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """R and C."""
    rows, columns = pi_shifts(inputs, outputs, damping)
    return inverse_root(outputs, rows), inverse_root(inputs, columns)


def pi_shifts(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """√γ/π, which is added to G, and π√γ, to A."""
    a, g = (_mean_eigenvalue(t) for t in (inputs, outputs))
    pi = torch.where((a > 0) & (g > 0), a / g, 1.0).sqrt()
    root = torch.as_tensor(damping, dtype=pi.dtype, device=pi.device).sqrt()
    return root / pi, root * pi


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors, and eigenvalues that rounding has not made negative."""
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # single precision fails on many equal values
        values, vectors = (t.to(factor.dtype) for t in torch.linalg.eigh(factor.double()))
    return vectors.contiguous(), values.clamp_min(0)


def eigen_scale(outputs: Tensor, inputs: Tensor, damping: float | Tensor) -> Tensor:
    """S = 1/√(g aᵀ + γ) from eigenvalues g (…, O) and a (…, J)."""
    return (outputs.unsqueeze(-1) * inputs.unsqueeze(-2) + damping).rsqrt()


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def inverse_root(factor: Tensor, shift: Tensor) -> Tensor:
    """L with LLᵀ = (factor + shift·I)⁻¹: the transposed inverse of the Cholesky factor."""
    matrix = factor.clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        return _inverse_root_by_eigenvalues(matrix, shift)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse.mT.contiguous()


def _inverse_root_by_eigenvalues(matrix: Tensor, shift: Tensor) -> Tensor:
    """Where rounding has eaten the shift: no eigenvalue is smaller than it."""
    if not bool((shift > 0).all()):
        raise InvalidValue(
            "a Kronecker factor is singular, and there is neither a prior nor damping: an improper posterior. Give "
            "prior_precision or damping > 0."
        )
    values, vectors = torch.linalg.eigh(matrix.double())
    floor = shift.double().unsqueeze(-1)
    root: Tensor = vectors * values.clamp_min(floor).rsqrt().unsqueeze(-2)
    return root.to(matrix.dtype).contiguous()


class Inverses:
    """H⁻¹ times a matrix; keeps the products RRᵀ and CCᵀ between refreshes. Copies start without them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __reduce__(self) -> tuple[type["Inverses"], tuple[()]]:
        return Inverses, ()

    def times(self, weight: Tensor, root: Root, matrix: Tensor) -> Tensor:
        if root.scale.dim():
            return root.covariance_times(matrix)
        kept = self._kept.get(id(weight))
        if kept is None or kept[0] is not root.rows:
            kept = root.rows, root.rows @ root.rows.mT, root.columns @ root.columns.mT
            self._kept[id(weight)] = kept
        return kept[1] @ matrix @ kept[2]


# The true Fisher

LIKELIHOODS = ("categorical", "gaussian")


def private_generator(seed: int, draw: int, call: int, device: torch.device) -> torch.Generator:
    """A stream that depends on nothing but its key."""
    key = blake2b(struct.pack("<QQQ", seed, draw, call), digest_size=7, person=b"fisher").digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))


def sampled_loss(outputs: Tensor, likelihood: str, generator: torch.Generator) -> Tensor:
    """The summed negative log-likelihood of labels drawn from it.

    "categorical": outputs are logits (M, classes), the loss is the cross-entropy. "gaussian": outputs (M, …) are
    means with unit variance, the loss is half the squared error.
    """
    if likelihood == "gaussian":
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=outputs.dtype)
        return 0.5 * (outputs - (outputs.detach() + noise)).square().sum()
    probabilities = outputs.detach().float().softmax(1)
    if not bool(probabilities.isfinite().all()):
        return outputs.sum() * float("nan")  # the step is refused, as for any other loss that is not finite
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return F.cross_entropy(outputs, labels, reduction="sum")


def check_outputs(outputs: object, likelihood: str) -> None:
    if likelihood not in LIKELIHOODS:
        raise InvalidValue(
            f"likelihood must be one of {', '.join(map(repr, LIKELIHOODS))}, got {likelihood!r}."
        )
    if not isinstance(outputs, Tensor) or not outputs.requires_grad:
        kind = "a tensor without a graph" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidType(f"outputs must be what the model returned in this block, got {kind}.")
    if likelihood == "categorical" and outputs.dim() != 2:
        raise InvalidValue(
            f"outputs of a categorical likelihood must be logits (M, classes); got {tuple(outputs.shape)}."
        )
