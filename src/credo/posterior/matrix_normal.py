"""Matrix-normal noise around a layer's mean: the root of its covariance, and the parameters that it covers.

A layer's weights are one matrix [W b], (O, J), or a stack of them (groups, O/groups, J). Its noise is

    R (S ∘ E) Cᵀ,   E standard normal,   Cov vec = (C ⊗ R) diag(vec S²) (C ⊗ R)ᵀ,   vec column-stacked

With S a number this is the matrix-normal with row covariance RRᵀ and column covariance CCᵀ; with orthogonal R and C,
a Gaussian that is diagonal in their basis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import InvalidValue
from credo.validate import named_tensors


@dataclass(frozen=True)
class Root:
    """A square root of a layer's covariance."""

    rows: Tensor  # R, (…, O, O)
    columns: Tensor  # C, (…, J, J)
    scale: Tensor  # S: one number, or (…, O, J)

    @property
    def shape(self) -> torch.Size:
        """Of the matrix, or of the stack of matrices."""
        return torch.Size((*self.rows.shape[:-1], self.columns.shape[-1]))

    def noise(self, standard: Tensor) -> Tensor:
        """R (S ∘ E) Cᵀ."""
        return self.rows @ (standard * self.scale) @ self.columns.mT

    def covariance_times(self, matrix: Tensor) -> Tensor:
        """Σ vec(V) as a matrix: R (S² ∘ (Rᵀ V C)) Cᵀ."""
        inner = self.rows.mT @ matrix @ self.columns
        return self.rows @ (inner * self.scale.square()) @ self.columns.mT

    def variance(self) -> Tensor:
        """The diagonal of the covariance, as the matrix lies."""
        return self.rows.square() @ self.scale.square().expand(self.shape) @ self.columns.square().mT

    def log_det(self) -> Tensor:
        """Of the covariance; a float64 number."""
        rows, columns = self.shape[-2:]
        own = self.scale.double().log().expand(self.shape).sum()
        sides = columns * _log_det(self.rows).sum() + rows * _log_det(self.columns).sum()
        return 2 * (own + sides)

    def whiten(self, deviation: Tensor) -> Tensor:
        """The E that gives this deviation from the mean; in float64."""
        left = torch.linalg.solve(self.rows.double(), deviation.double())
        both: Tensor = torch.linalg.solve(self.columns.double(), left.mT).mT
        return both / self.scale.double()

    def trace_under(self, other: "Root") -> Tensor:
        """tr(P Σ), Σ this covariance and P the inverse of the other's; a float64 number."""
        rows = torch.linalg.solve(other.rows.double(), self.rows.double()).square()
        columns = torch.linalg.solve(other.columns.double(), self.columns.double()).square()
        spread: Tensor = rows @ self.scale.double().square().expand(self.shape) @ columns.mT
        return (spread / other.scale.double().square()).sum()

    def dense(self) -> Tensor:
        """Cov vec([W b]) with the rows of all groups stacked: (O·J, O·J)."""
        rows, columns, scale = (
            t if t.dim() == 3 else t.unsqueeze(0) for t in (self.rows, self.columns, self._full())
        )
        blocks = [_dense(*parts) for parts in zip(rows, columns, scale, strict=True)]  # (J, O', J, O') each
        groups, o, j = len(blocks), rows.shape[-1], columns.shape[-1]
        whole = rows.new_zeros((j, groups, o, j, groups, o))
        for k, block in enumerate(blocks):
            whole[:, k, :, :, k] = block
        return whole.reshape(groups * o * j, -1)

    def to(self, device: torch.device | str) -> "Root":
        return Root(self.rows.to(device), self.columns.to(device), self.scale.to(device))

    def _full(self) -> Tensor:
        return self.scale.expand(self.shape)


def _dense(rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    root = torch.kron(columns, rows) * scale.T.reshape(1, -1)
    o, j = scale.shape
    return (root @ root.T).view(j, o, j, o)


def _log_det(matrix: Tensor) -> Tensor:
    result: Tensor = torch.linalg.slogdet(matrix.double()).logabsdet
    return result


def as_matrix(weight: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """[W b] as `Root.shape` says: the weight (O, …) with its other dimensions as columns."""
    columns = weight.flatten(1)
    joined = columns if bias is None else torch.cat([columns, bias.unsqueeze(1)], 1)
    return joined.reshape(shape)


def from_matrix(matrix: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """The weight, shaped like `weight`, and the bias in a matrix [W b]."""
    rows = matrix.reshape(len(weight), -1)
    width = rows.shape[1] - biased
    return rows[:, :width].reshape(weight.shape), rows[:, width] if biased else None


@dataclass(frozen=True)
class Layer:
    weight: str
    bias: str | None
    root: Root

    @property
    def members(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[W b] out of tensors by name."""
        bias = None if self.bias is None else tensors[self.bias]
        return as_matrix(tensors[self.weight], bias, self.root.shape)

    def unpacked(self, matrix: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in [W b] by name, shaped as in `like`."""
        weight, bias = from_matrix(matrix, like[self.weight], self.bias is not None)
        return {self.weight: weight} if bias is None else {self.weight: weight, self.bias or "": bias}

    def places(self, name: str) -> Tensor:
        """Where one of its parameters stands in the column-stacked vec([W b])."""
        columns = torch.arange(self.root.shape.numel()).view(self.root.shape[-1], -1)
        width = len(columns) - (self.bias is not None)
        return (columns[width:] if name == self.bias else columns[:width]).reshape(-1)

    def owned(self, name: str, mean: Mapping[str, Tensor]) -> "Layer":
        """A copy that shares no memory and fits the means; or an error that names the layer."""
        missing = [member for member in self.members if member not in mean]
        if missing:
            raise InvalidValue(f"layer {name!r} has a parameter {missing[0]!r} that mean lacks")
        parts = {"rows": self.root.rows, "columns": self.root.columns, "scale": self.root.scale}
        root = Root(**named_tensors(f"layer {name!r}", parts))
        size = sum(mean[member].numel() for member in self.members)
        shaped = root.scale.dim() == 0 or root.scale.shape == root.shape
        if not shaped or root.shape.numel() != size:
            raise InvalidValue(
                f"layer {name!r} has {size} weights and biases; its factors are for {tuple(root.shape)}, with a scale"
                f" of shape {tuple(root.scale.shape)}"
            )
        if not all(bool(part.isfinite().all()) for part in (root.rows, root.columns)) or not _positive(
            root.scale
        ):
            raise InvalidValue(f"layer {name!r} must have finite factors and a positive, finite scale")
        return Layer(self.weight, self.bias, root)


def _positive(scale: Tensor) -> bool:
    return bool((scale.isfinite() & (scale > 0)).all())
