"""Step, damping, noise and prior of each tensor, relative to the tensor itself: what the methods take when not told.

A tensor of weights has a mean square v at the start, a mean curvature h̄ (of s, followed through training) and, at the
first minibatch, an alignment a = rms(ĝ)/√h̄: 1 if all examples pull alike, 1/√M if each pulls for itself. With N the
data size times ρ, L the number of weight matrices with noise, and G the growth of the noise, 1 at first:

    γ = c·h̄                     c = 0.2: a small part of the precision is the tensor's mean, the rest each weight's own
    α = r·√u·(h̄ + γ)/(a·√h̄)     r = 0.006: a plain step moves a tensor by about r of its size
    τ = κ²·v·N·(h̄ + γ)          the noise is κ of the weights, whatever N and the curvature are
    κ = 0.3/√L·G                relative noise adds up over layers, so that of each falls with √L
    δ = 1/v                     a prior as wide as the weights at the start; no weight has more noise than that

u is v, but for matrices that start small (adapters at zero, weights of 0.02 whatever the width), which have to grow: it
is at least 0.8/(3·inputs) of the tensor, about what torch gives a layer.

G grows while the training loss is well below what it was when the examples had been seen a few times (`Progress`), if
the loss is that of classes or labels (cross-entropy and the like), which has a natural zero. A squared error leaves the
variance of the observations open, and noise in the weights adds to it. The logarithm of a density (a Gaussian with a
variance of its own, a Poisson rate) has an arbitrary constant, so that a share of it means nothing. There G stays 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.optim import arguments

STEP = 0.006  # r
DAMPING = 0.2  # c
KRONECKER_DAMPING = (
    1.0  # c: few directions of A ⊗ G hold nearly all of its mean, and it is known every tenth step only
)
NOISE = 0.3  # κ√L at the start
AVERAGING = 8.0  # η: the mean is over the last ninth of all steps or so
FOLLOWED = 0.1  # weight of the newest gradient in its mean square, where that is followed
USUAL_SIZE = 0.8  # of the mean square that torch gives a layer; below it a start counts as small
SMALLEST_SQUARE = 1e-4  # v of what starts at zero, such as biases
NOTHING = 1e-12  # mean square of a matrix that starts at zero
TINY = 1e-30  # h̄ of a tensor without any gradient


class TensorNumbers(NamedTuple):
    """What updates are made with: of one tensor, or lists with one for each."""

    lr: Any  # α
    damping: Any  # γ
    tempering: Any  # τ
    prior_precision: Any  # δ


class Given(NamedTuple):
    """What a constructor was told; None is left to the rule."""

    lr: float | Tensor | None
    damping: float | None
    tempering: float | None
    prior_precision: float | None
    initial_precision: bool  # whether it was given
    usual_damping: float = DAMPING  # c

    def options(self) -> dict[str, Any]:
        """For the parameter groups. A damping or a start of the precision bounds the noise by itself: τ is then 1."""
        free = self.damping is None and self.tempering is None and not self.initial_precision
        precision = self.prior_precision
        return {
            "lr": arguments.learning_rate(STEP if self.lr is None else self.lr),
            "damping": self.usual_damping if self.damping is None else self.damping,
            "tempering": 1.0 if self.tempering is None else self.tempering,
            "prior_precision": precision if free or precision is not None else 1.0,
            "relative_lr": self.lr is None,
            "relative_damping": self.damping is None,
            "noise": NOISE if free else None,
        }


def averaging_of(eta: float | None, lr: float | Tensor | None) -> float:
    """η. Without a word on it the mean is an average unless the learning rate was given."""
    if eta is None:
        return AVERAGING if lr is None else 0.0
    return arguments.number("averaging", eta, 0, math.inf)


def can_average(group: Mapping[str, Any]) -> bool:
    """Whether means of this group can be averages: with less than single precision, offsets would be rounded away."""
    return all(p.dtype in (torch.float32, torch.float64) for p in group["params"])


def ivon_options(
    lr: float | Tensor | None,
    betas: tuple[float, float],
    tempering: float | None,
    prior_precision: float | None,
    initial_curvature: float | None,
) -> dict[str, Any]:
    """For IVON's groups: its momentum is a mean of gradients, not their sum, so that steps are longer by 1/(1 − b₁).

    A learning rate or a start of the curvature belongs to a scale of its own: τ is then 1.
    """
    free = lr is None and tempering is None and initial_curvature is None
    first = betas[0] if isinstance(betas, tuple | list) and len(betas) == 2 else 0.0  # checked later
    step = STEP / (1 - first) if isinstance(first, float) and first < 1 else STEP
    return {
        "lr": arguments.learning_rate(step if lr is None else lr),
        "tempering": 1.0 if tempering is None else tempering,
        "prior_precision": prior_precision if free or prior_precision is not None else 1.0,
        "relative_lr": lr is None,
        "noise": NOISE if free else None,
    }


def check_relative(group: Mapping[str, Any]) -> None:
    """Refuses values out of range, by name."""
    if group["prior_precision"] is not None:
        arguments.number("prior_precision", group["prior_precision"], 0, math.inf)
    arguments.number("tempering", group["tempering"], 0, 1, open_low=True)
    if group["noise"] is not None:
        arguments.number("noise", group["noise"], 0, math.inf, open_low=True)


def own_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that was given some: what it was told is absolute."""
    told: dict[str, Any] = {f"relative_{name}": False for name in ("lr", "damping") if name in group}
    if "damping" in group or "tempering" in group:
        told["noise"] = None
    return {**told, **group}


def share_noise(groups: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """κ of each group, and of groups that join later: divided by √L, L the number of weight matrices with noise."""
    matrices = [
        p for g in groups if not g["deterministic"] for p in g["params"] if p.dim() > 1 and p.requires_grad
    ]
    for options in [*groups, defaults]:
        if options["noise"] == NOISE:
            options["noise"] = NOISE / math.sqrt(max(len(matrices), 1))


def take_absolute(groups: Sequence[dict[str, Any]]) -> None:
    """Groups that were saved when all numbers were absolute."""
    for group in groups:
        for name, value in {"relative_lr": False, "relative_damping": False, "noise": None}.items():
            group.setdefault(name, value)
