"""VOGN's update in one pass over the parameters, and the check that comes before it."""

from collections.abc import Sequence
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import lists
from credo.kernels.lists import Row
from credo.kernels.native import integers


class Settings(NamedTuple):
    """The numbers of one update."""

    lr: float  # α
    beta1: float  # β₁
    beta2: float  # β₂, the weight of the new curvature
    damping: float  # γ
    gradient_scale: float  # ĝ = gradient_scale · gradient
    squares_scale: float  # ĥ = squares_scale · squares


def vogn_(
    mean: Tensor,  # μ
    momentum: Tensor,  # m
    curvature: Tensor,  # s
    gradient: Tensor,
    squares: Tensor,
    *,
    prior: float | Tensor,  # δ̃
    prior_mean: Tensor | None,  # μ₀, zero when None
    lr: float,
    beta1: float,
    beta2: float,
    damping: float,
    gradient_scale: float,
    squares_scale: float,
) -> None:
    """m ← β₁m + ĝ + δ̃(μ−μ₀),  s ← (1−β₂)s + β₂ĥ,  μ ← μ − α·m / (s+δ̃+γ)."""
    settings = Settings(lr, beta1, beta2, damping, gradient_scale, squares_scale)
    priors = [prior] if isinstance(prior, Tensor) else prior
    rows = [mean], [momentum], [curvature], [gradient], [squares]
    vogn_all_(*rows, priors, None if prior_mean is None else [prior_mean], settings)


@torch.no_grad()
def vogn_all_(
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    squares: Row,
    prior: float | Row,
    prior_means: Row | None,
    settings: Settings,
) -> None:
    """`vogn_` for many tensors in one call; `prior` is one number, or a tensor for each."""
    number, priors = (float(prior), None) if isinstance(prior, float | int) else (0.0, prior)
    rows = [means, momenta, curvatures, gradients, squares]
    given = [row for row in (priors, prior_means) if row is not None]
    kernel = lists.native("vogn", *rows, *given) if lists.aligned(*rows, *given) else None
    if kernel is not None:
        numbers = lists.doubles(*settings, number)
        kernel(lists.addresses(*rows, priors, prior_means), *_layout(means), numbers, _threads())
        increment_version([*means, *momenta, *curvatures])
        return
    for k in range(len(means)):
        own_prior, own_mean = (
            number if priors is None else priors[k],
            None if prior_means is None else prior_means[k],
        )
        _vogn_twin(
            means[k], momenta[k], curvatures[k], gradients[k], squares[k], own_prior, own_mean, settings
        )


def _vogn_twin(
    mean: Tensor,
    momentum: Tensor,
    curvature: Tensor,
    gradient: Tensor,
    squares: Tensor,
    prior: float | Tensor,
    prior_mean: Tensor | None,
    settings: Settings,
) -> None:
    away = mean if prior_mean is None else mean - prior_mean
    momentum.mul_(settings.beta1).add_(gradient, alpha=settings.gradient_scale)
    if isinstance(prior, Tensor):
        momentum.addcmul_(prior, away)
    elif prior:
        momentum.add_(away, alpha=prior)
    curvature.mul_(1 - settings.beta2).add_(squares, alpha=settings.beta2 * settings.squares_scale)
    mean.addcdiv_(momentum, curvature + (prior + settings.damping), value=-settings.lr)


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is infinite or NaN: one pass, no copy, at most one wait for the device."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return True
    if all(lists.is_dense(tensor) for tensor in tensors) and (kernel := lists.native("all_finite", tensors)):
        return bool(kernel(lists.addresses(tensors), *_layout(tensors), _threads()))
    # A sum is finite only if all its terms are. Large finite terms may overflow: then look at each.
    sums = torch.stack([tensor.sum().double() for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)


def _layout(tensors: Row) -> tuple[object, c_int64]:
    return integers(*[tensor.numel() for tensor in tensors]), c_int64(len(tensors))


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())
