"""The Gaussian that K-FAC leaves: matrix-normal in each layer, mean-field in the rest.

[W b] = M + R (S ∘ E) Cᵀ        by layer, see `matrix_normal`
w = μ + σ·ε                     what has no Kronecker factors

KL(q‖p) of a layer is exact: ½(tr PΣ + (μ−μ₀)ᵀP(μ−μ₀) − d − log|Σ| − log|P|), P the precision of the prior.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from credo.errors import InvalidValue, UnsupportedOperation
from credo.posterior.base import Posterior, Prior, Weights, check_generator, standard_normal
from credo.posterior.diagonal import (
    LOG_2PI,
    DiagonalPosterior,
    entropy_terms,
    kl_terms,
    log_prob_terms,
    scaled_variance,
    sum_terms,
)
from credo.posterior.files import register_kind
from credo.posterior.matrix_normal import Layer, Root
from credo.validate import json_copy, mismatches, named_tensors, positive


@final
@register_kind
class KroneckerPosterior(Posterior):
    """`layers` by name, each with a Kronecker-factored covariance; `variance` for names that are in none of them.

    Names in neither are deterministic. The order of the names in `mean` is the order in which draws use the
    random stream; a layer draws where its weight stands.
    """

    kind: ClassVar[str] = "kronecker"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        layers: Mapping[str, Layer],
        variance: Mapping[str, Tensor],
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self._mean = named_tensors("mean", mean)
        self._layers = {name: layer.owned(name, self._mean) for name, layer in layers.items()}
        self._inside = {m: layer for layer in self._layers.values() for m in layer.members}
        if twice := self._inside.keys() & variance.keys():
            raise InvalidValue(f"{min(twice)!r} has a variance and is part of a layer; give one of them")
        rest = DiagonalPosterior(self._mean, variance)
        self._rest = {n: v for n, v in rest.variance.items() if n not in rest.deterministic}
        self._certain = frozenset(rest.deterministic - self._inside.keys())
        self._metadata = json_copy("metadata", metadata or {})
        self._variance: Weights = {}  # of all names, at need

    @property
    def mean(self) -> Weights:
        return dict(self._mean)

    @property
    def layers(self) -> dict[str, Layer]:
        return dict(self._layers)

    @property
    def variance(self) -> Weights:
        """The diagonal of the covariance."""
        if not self._variance:
            found = dict(self._rest)
            for layer in self._layers.values():
                found |= layer.unpacked(layer.root.variance(), self._mean)
            zeros = {n: self._mean[n].new_zeros(()).expand(self._mean[n].shape) for n in self._certain}
            self._variance = {name: (found | zeros)[name] for name in self._mean}
        return dict(self._variance)

    @property
    def deterministic(self) -> frozenset[str]:
        return self._certain

    @property
    def metadata(self) -> dict[str, object]:
        """With `layers`: name → [weight, bias]."""
        layers = {name: [layer.weight, layer.bias] for name, layer in self._layers.items()}
        return json_copy("metadata", {**self._metadata, "layers": layers})

    def sample_many(self, generator: torch.Generator | None, n: int) -> Weights:
        """One row of ε per draw; draw by draw, because a product of many matrices rounds differently."""
        generator = check_generator(self._own_generator() if generator is None else generator, self.device)
        width = sum(self._mean[name].numel() for name in (*self._inside, *self._rest))
        wide = any(mean.dtype == torch.float64 for mean in self._mean.values())
        dtype = torch.float64 if wide else torch.float32
        draws = [self._draw(row) for row in standard_normal(generator, n, width, dtype, self.device)]
        return {
            name: torch.stack([draw[name] for draw in draws]) if draws else mean.new_empty((0, *mean.shape))
            for name, mean in self._mean.items()
        }

    def _draw(self, noise: Tensor) -> Weights:
        found: Weights = {}
        for name, mean in self._mean.items():
            if name in self._rest:
                part, noise = noise[: mean.numel()].view(mean.shape), noise[mean.numel() :]
                found[name] = part * self._rest[name].sqrt()
            elif name in self._inside and self._inside[name].weight == name:
                layer = self._inside[name]
                size = layer.root.shape.numel()
                part, noise = noise[:size].view(layer.root.shape), noise[size:]
                found |= layer.unpacked(layer.root.noise(part.to(layer.root.rows.dtype)), self._mean)
        return {name: (m + found[name]).to(m.dtype) if name in found else m for name, m in self._mean.items()}

    def kl(self, prior: Prior) -> Tensor:
        """Exact, to a precision δ, a diagonal posterior, or a Kronecker one with the same layers."""
        if not isinstance(prior, Posterior):
            return self._kl_to_precision(positive("prior", prior))
        self._check_same_weights(
            "prior", {n: m for n, m in prior.mean.items() if n not in prior.deterministic}
        )
        there = prior.to(self.device)
        mean, variance = there.mean, there.variance
        others = there.layers if isinstance(there, KroneckerPosterior) else {}
        if {n: v.members for n, v in others.items()} not in (
            {},
            {n: v.members for n, v in self._layers.items()},
        ):
            raise UnsupportedOperation(
                "prior has other layers than the posterior; use DiagonalPosterior(prior.mean, prior.variance)"
            )
        terms = [
            _kl_to_layer(layer, self._mean, others[name].root, mean)
            if others
            else _kl_to_diagonal(layer, self._mean, mean, variance)
            for name, layer in self._layers.items()
        ]
        rest = (kl_terms(self._mean[n], own, mean[n], variance[n]) for n, own in self._rest.items())
        return sum_terms((*terms, *rest), self.device)

    def _kl_to_precision(self, precision: float) -> Tensor:
        layers = (_kl_to_number(v, self._mean, precision) for v in self._layers.values())
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        rest = (kl_terms(self._mean[n], own, zero, zero + 1 / precision) for n, own in self._rest.items())
        return sum_terms((*layers, *rest), self.device)

    def entropy(self) -> Tensor:
        each = 1 + LOG_2PI
        roots = [layer.root for layer in self._layers.values()]
        terms = [0.5 * (root.shape.numel() * each + root.log_det()) for root in roots]
        return sum_terms((*terms, *map(entropy_terms, self._rest.values())), self.device)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        given = {name: w.to(self.device) for name, w in weights.items() if name not in self._certain}
        self._check_same_weights("weights", given)
        terms = [log_prob_terms(given[n], self._mean[n], variance) for n, variance in self._rest.items()]
        for layer in self._layers.values():
            away = layer.packed(given).double() - layer.packed(self._mean).double()
            standard = layer.root.whiten(away).square() + LOG_2PI
            terms.append(-0.5 * (standard.sum() + layer.root.log_det()))
        return sum_terms(terms, self.device)

    def to(self, device: torch.device | str) -> "KroneckerPosterior":
        mean, variance = ({n: t.to(device) for n, t in part.items()} for part in (self._mean, self._rest))
        layers = {n: Layer(v.weight, v.bias, v.root.to(device)) for n, v in self._layers.items()}
        buffers = {name: tensor.to(device) for name, tensor in self._buffers.items()}
        return KroneckerPosterior(mean, layers, variance, self._metadata).with_buffers(buffers)

    def _scaled(self, factor: float) -> "KroneckerPosterior":
        """√factor goes into the scale S of each layer: the covariance has it squared."""
        variance = {name: scaled_variance(name, v, factor) for name, v in self._rest.items()}
        layers = {
            name: Layer(
                v.weight, v.bias, replace(v.root, scale=scaled_variance(name, v.root.scale, factor**0.5))
            )
            for name, v in self._layers.items()
        }
        metadata = {n: v for n, v in self._metadata_scaled(factor).items() if n != "layers"}
        return KroneckerPosterior(self._mean, layers, variance, metadata)

    def dense_covariance(self, name: str) -> Tensor:
        if name in self._layers:
            return self._layers[name].root.dense()
        if name in self._inside:
            places = self._inside[name].places(name)
            return self._inside[name].root.dense()[places][:, places]
        return DiagonalPosterior(self._mean, self._rest).dense_covariance(name)

    def tensors(self) -> Weights:
        found = {f"mean/{name}": tensor for name, tensor in self._mean.items()}
        for name, layer in self._layers.items():
            parts = {"rows": layer.root.rows, "columns": layer.root.columns, "scale": layer.root.scale}
            found |= {f"{part}/{name}": tensor for part, tensor in parts.items()}
        return found | {f"variance/{name}": tensor for name, tensor in self._rest.items()}

    @classmethod
    def from_tensors(cls, tensors: Weights, metadata: Mapping[str, object]) -> "KroneckerPosterior":
        members = metadata["layers"]
        assert isinstance(members, dict)
        layers = {
            name: Layer(
                pair[0], pair[1], Root(*(tensors[f"{part}/{name}"] for part in ("rows", "columns", "scale")))
            )
            for name, pair in members.items()
        }
        mean, variance = (
            {key.removeprefix(part): tensor for key, tensor in tensors.items() if key.startswith(part)}
            for part in ("mean/", "variance/")
        )
        return cls(mean, layers, variance, {k: v for k, v in metadata.items() if k != "layers"})

    def __repr__(self) -> str:
        weights = sum(self._mean[name].numel() for name in (*self._inside, *self._rest))
        return (
            f"KroneckerPosterior({weights:,} weights, {len(self._layers)} layers and {len(self._rest)} other tensors,"
            f" {len(self._certain)} deterministic tensors, {self._metadata})"
        )

    def _check_same_weights(self, argument: str, other: Mapping[str, Tensor]) -> None:
        wanted = {name: m.shape for name, m in self._mean.items() if name not in self._certain}
        if wrong := mismatches(wanted, other):
            raise InvalidValue(f"{argument} and the posterior hold different weights: {wrong}")


def _kl_to_layer(
    own: Layer, mean: Mapping[str, Tensor], other: Root, other_mean: Mapping[str, Tensor]
) -> Tensor:
    """The prior of the layer is matrix-normal too."""
    away = own.packed(mean).double() - own.packed(other_mean).double()
    distance = other.whiten(away).square().sum()
    return _kl(own.root, own.root.trace_under(other), distance, other.log_det())


def _kl_to_diagonal(
    own: Layer,
    mean: Mapping[str, Tensor],
    prior_mean: Mapping[str, Tensor],
    prior_variance: Mapping[str, Tensor],
) -> Tensor:
    """The prior has a variance for each weight."""
    spread = own.packed(prior_variance).double()
    away = own.packed(mean).double() - own.packed(prior_mean).double()
    trace = (own.root.variance().double() / spread).sum()
    return _kl(own.root, trace, (away.square() / spread).sum(), spread.log().sum())


def _kl_to_number(own: Layer, mean: Mapping[str, Tensor], precision: float) -> Tensor:
    """The prior is N(0, 1/δ)."""
    trace, distance = (precision * t.double().sum() for t in (own.root.variance(), own.packed(mean).square()))
    size = own.root.shape.numel()
    return _kl(own.root, trace, distance, -size * torch.tensor(precision, dtype=torch.float64).log())


def _kl(root: Root, trace: Tensor, distance: Tensor, log_det: Tensor) -> Tensor:
    return 0.5 * (trace + distance - root.shape.numel() + log_det - root.log_det())
