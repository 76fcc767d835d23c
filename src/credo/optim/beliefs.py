"""A parameter with what is known of it: σ² = τ / (N(s + δ̃ + γ))."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.optim.relative import TensorNumbers


@dataclass(slots=True)
class Belief:
    """One parameter with what is known of it, and the numbers of its group."""

    name: str
    parameter: Tensor
    curvature: Tensor | None  # s; None before its first gradient
    shrinkage: float | Tensor  # δ̃ = τδ/N
    numbers: TensorNumbers  # α, γ, τ, δ
    data_size: float  # N
    deterministic: bool

    @property
    def damping(self) -> float:
        """γ."""
        return float(self.numbers.damping)

    @property
    def tempering(self) -> float:
        """τ."""
        return float(self.numbers.tempering)

    @property
    def scale(self) -> float:
        """τ/N, so that σ² = scale / (s + δ̃ + γ)."""
        return self.tempering / self.data_size

    def variance(self, damped: bool = True) -> Tensor:
        s = torch.zeros_like(widen(self.parameter.detach())) if self.curvature is None else self.curvature
        return self.scale / (s + self.shrinkage + (self.damping if damped else 0.0))
