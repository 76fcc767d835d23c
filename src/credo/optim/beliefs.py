"""A parameter with what is known of it: σ² = τ / (N(s + δ̃ + γ))."""

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Alike:
    """Parameters that one call can draw: their τ/N is the same, and δ̃ + γ is one number (or a tensor for each)."""

    shift: float | None  # δ̃ + γ; None: a tensor for each
    beliefs: list[Belief] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # which parameter each of them is

    def widths(self) -> tuple[list[Tensor], float, float | list[Tensor]]:
        """s, τ/N and δ̃ + γ, of which σ² is made."""
        shifts: list[Tensor] = [b.shrinkage + b.damping for b in self.beliefs] if self.shift is None else []  # type: ignore[misc]
        curvatures: list[Tensor] = [b.curvature for b in self.beliefs]  # type: ignore[misc]
        return curvatures, self.beliefs[0].scale, shifts if self.shift is None else self.shift
