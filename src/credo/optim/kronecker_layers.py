"""A layer as K-FAC sees it: its parameters, its factors A and G, and the root of their damped inverse."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.curvature.kronecker import LayerSums
from credo.curvature.rule import widen
from credo.optim.checkpoints import FACTORS
from credo.optim.inverses import eigen_scale, eigenbasis, inverse_root, pi_roots, pi_shifts
from credo.posterior.matrix_normal import Root, as_matrix, from_matrix

State = dict[str, Tensor]
SIDES = ("output", "input")  # of a layer: each has a factor


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
