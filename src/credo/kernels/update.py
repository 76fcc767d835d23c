"""VOGN's update in one pass over the parameters, and the check that comes before it."""

from collections.abc import Iterator, Sequence
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import lists
from credo.kernels.lists import Row

TOGETHER = 1 << 20  # elements that the twin updates at once, unless one tensor has more


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


def vogn_all_(
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    squares: Row,
    prior: float | Row,
    prior_means: Row | None,
    settings: Settings,
    origins: Row | None = None,
) -> None:
    """`vogn_` for many tensors in one call; `prior` is one number, or a tensor for each.

    `origins`: where the means are before the update, unless they are in `means`.
    """
    number, priors = (float(prior), None) if isinstance(prior, float | int) else (0.0, prior)
    rows = [means, momenta, curvatures, gradients, squares]
    if call := lists.call("vogn", *rows, priors, prior_means, origins):
        call.kernel(*call[1:], lists.doubles(*settings, number), _threads())
        increment_version([*means, *momenta, *curvatures])
        return
    with torch.no_grad():
        if origins is not None:
            torch._foreach_copy_(list(means), list(origins))
        for few in _groups(means):
            mu, m, s, gradient, square = ([row[k] for k in few] for row in rows)
            own_prior = number if priors is None else [priors[k] for k in few]
            own_means = None if prior_means is None else [prior_means[k] for k in few]
            _vogn_twin(mu, m, s, gradient, square, own_prior, own_means, settings)


def _vogn_twin(
    means: list[Tensor],
    momenta: list[Tensor],
    curvatures: list[Tensor],
    gradients: list[Tensor],
    squares: list[Tensor],
    prior: float | list[Tensor],
    prior_means: list[Tensor] | None,
    settings: Settings,
) -> None:
    torch._foreach_mul_(momenta, settings.beta1)
    torch._foreach_add_(momenta, gradients, alpha=settings.gradient_scale)
    torch._foreach_mul_(curvatures, 1 - settings.beta2)
    torch._foreach_add_(curvatures, squares, alpha=settings.beta2 * settings.squares_scale)
    away = means if prior_means is None else torch._foreach_sub(means, prior_means)
    if isinstance(prior, list):
        torch._foreach_addcmul_(momenta, prior, away)
        precisions = torch._foreach_add(curvatures, prior)
        torch._foreach_add_(precisions, settings.damping)
    else:
        torch._foreach_add_(momenta, away, alpha=prior)
        precisions = torch._foreach_add(curvatures, prior + settings.damping)
    torch._foreach_addcdiv_(means, momenta, precisions, -settings.lr)


def _groups(tensors: Row) -> Iterator[list[int]]:
    """Neighbours with `TOGETHER` elements at most: few calls, and little memory for what they compute on the way."""
    group: list[int] = []
    elements = 0
    for k, tensor in enumerate(tensors):
        if group and elements + tensor.numel() > TOGETHER:
            yield group
            group, elements = [], 0
        group.append(k)
        elements += tensor.numel()
    if group:
        yield group


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is infinite or NaN: one pass, no copy, at most one wait for the device."""
    if call := lists.call("all_finite", tensors):
        return bool(call.kernel(*call[1:], _threads()))
    with torch.no_grad():
        return _all_finite_twin([tensor for tensor in tensors if tensor.numel()])


def _all_finite_twin(tensors: list[Tensor]) -> bool:
    if not tensors:
        return True
    # A norm is finite only if all elements are. Large finite ones may overflow: then look at each.
    sums = torch.stack([norm.double() for norm in torch._foreach_norm(tensors)])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())
