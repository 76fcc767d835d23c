"""A parameter with what is known of it: σ² = τ / (N(s + δ̃ + γ))."""

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.curvature.contribution import widen


@dataclass(slots=True)
class Belief:
    """One parameter with what is known of it, and the numbers of its group."""

    name: str
    parameter: Tensor
    curvature: Tensor | None  # s; None before its first gradient
    shrinkage: float | Tensor  # δ̃ = τδ/N
    damping: float  # γ
    tempering: float  # τ
    data_size: float  # N
    deterministic: bool

    @property
    def scale(self) -> float:
        """τ/N, so that σ² = scale / (s + δ̃ + γ)."""
        return self.tempering / self.data_size

    def variance(self, damped: bool = True) -> Tensor:
        s = torch.zeros_like(widen(self.parameter.detach())) if self.curvature is None else self.curvature
        return self.scale / (s + self.shrinkage + (self.damping if damped else 0.0))
