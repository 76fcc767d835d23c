"""H in its own basis: adding δI adds δ to every eigenvalue.

diagonal    h is the diagonal itself
Kronecker   H ≈ A ⊗ G / N by layer, with sums A = Σ aaᵀ and G = Σ ggᵀ = U_A Λ_A U_Aᵀ ⊗ …: h = λ_A λ_G / N, and the
            posterior's root is U_G (S ∘ E) U_Aᵀ with S = (h + δ)^(−½)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.posterior.base import Posterior
from credo.posterior.diagonal import DiagonalPosterior
from credo.posterior.kronecker import KroneckerPosterior
from credo.posterior.matrix_normal import Layer, Root


class DiagonalCurvature:
    def __init__(
        self, mean: Mapping[str, Tensor], sums: Mapping[str, Tensor], examples: int, log_likelihood: float
    ) -> None:
        self._mean, self._sums = dict(mean), dict(sums)
        self.examples, self.log_likelihood = examples, log_likelihood

    def eigenvalues(self) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in self._sums.values()])

    def square(self) -> float:
        return square_of(self._mean, self._sums)

    def posterior(self, precision: float, metadata: dict[str, object]) -> Posterior:
        variance = {n: (1 / (h + precision)).to(_dtype(self._mean[n])) for n, h in self._sums.items()}
        return DiagonalPosterior(self._mean, variance, metadata)


@dataclass
class LayerMoments:
    weight: str
    bias: str | None
    inputs: Tensor  # Σ aaᵀ, (…, J, J)
    outputs: Tensor  # Σ ggᵀ, (…, O, O)


@dataclass
class LayerBasis:
    """Eigenvectors and eigenvalues of a layer's H."""

    weight: str
    bias: str | None
    rows: Tensor  # U_G
    columns: Tensor  # U_A
    values: Tensor  # h, (…, O, J)


class KroneckerCurvature:
    """Filled batch by batch, then `finished`."""

    def __init__(self, mean: Mapping[str, Tensor], members: list[str]) -> None:
        self._mean, self.members = dict(mean), frozenset(members)
        self._order = list(members)
        self._layers: dict[str, LayerMoments] = {}
        self._squares: dict[str, Tensor] = {}
        self._bases: dict[str, LayerBasis] = {}
        self.examples, self.log_likelihood = 0, 0.0

    def add_layer(self, name: str, weight: str, bias: str | None, inputs: Tensor, outputs: Tensor) -> None:
        inputs, outputs = inputs.double(), outputs.double()
        if name in self._layers:
            self._layers[name].inputs += inputs
            self._layers[name].outputs += outputs
        else:
            self._layers[name] = LayerMoments(weight, bias, inputs.clone(), outputs.clone())

    def add_squares(self, name: str, squares: Tensor) -> None:
        self._squares[name] = self._squares.get(name, 0) + squares.double()

    def finished(self) -> "KroneckerCurvature":
        """What no pass has reached has no curvature: the prior alone says where it is."""
        inside = {m for layer in self._layers.values() for m in (layer.weight, layer.bias) if m is not None}
        self._squares = {
            name: self._squares[name]
            if name in self._squares
            else torch.zeros_like(self._mean[name]).double()
            for name in self._order
            if name not in inside
        }
        self._bases = {name: self._basis(layer) for name, layer in self._layers.items()}
        return self

    def _basis(self, layer: LayerMoments) -> LayerBasis:
        left, rows = torch.linalg.eigh(layer.outputs)
        right, columns = torch.linalg.eigh(layer.inputs)
        values = left.clamp_min(0).unsqueeze(-1) * right.clamp_min(0).unsqueeze(-2) / self.examples
        return LayerBasis(layer.weight, layer.bias, rows, columns, values)

    def eigenvalues(self) -> Tensor:
        parts = [basis.values.flatten() for basis in self._bases.values()]
        return torch.cat([*parts, *(tensor.flatten() for tensor in self._squares.values())])

    def square(self) -> float:
        return square_of(self._mean, self.members)

    def posterior(self, precision: float, metadata: dict[str, object]) -> Posterior:
        layers = {}
        for name, basis in self._bases.items():
            dtype = _dtype(self._mean[basis.weight])
            scale = (basis.values + precision).rsqrt()
            root = Root(*(part.to(dtype) for part in (basis.rows, basis.columns, scale)))
            layers[name] = Layer(basis.weight, basis.bias, root)
        variance = {n: (1 / (h + precision)).to(_dtype(self._mean[n])) for n, h in self._squares.items()}
        return KroneckerPosterior(self._mean, layers, variance, metadata)


def square_of(mean: Mapping[str, Tensor], names: object) -> float:
    chosen = [tensor for name, tensor in mean.items() if name in names]  # type: ignore[operator]
    return sum(tensor.double().square().sum().item() for tensor in chosen)


def _dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
