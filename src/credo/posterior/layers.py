"""A layer of a Kronecker posterior: which parameters make up [W b], and how it spreads."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import InvalidValue
from credo.posterior.arguments import named_tensors
from credo.posterior.matrix_normal import Root, as_matrix, from_matrix


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
