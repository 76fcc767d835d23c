"""IVON's update in one pass over the parameters, and the way from a sample back to the mean."""

from ctypes import c_int64
from struct import pack
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import lists
from credo.kernels.lists import Numbers, Row

LARGEST = 1e30  # an infinite curvature would be a variance of zero


class Settings(NamedTuple):
    """The numbers of one update; those that may be one for each tensor are `Numbers`."""

    lr: Numbers  # α
    beta1: float  # b₁, the weight of the old momentum
    beta2: float  # b₂, the weight of the old curvature
    correction: float  # 1/(1 − b₁ᵗ)
    radius: float  # of the clipped step; infinite without
    gradient_unit: float  # ĝ = gradient_unit · gradient
    product_unit: Numbers  # ĥ = product_unit · product · (h + δ̃)


@torch.no_grad()
def restore_all_(weights: Row, means: Row, products: Row, gradients: Row, add: bool) -> None:
    """product ← (product +) gradient·(weight − mean), then weight ← mean."""
    if not weights:
        return
    rows = weights, means, products, gradients
    if call := lists.call("restore", *rows):
        call.kernel(*call[1:], c_int64(add), _threads())
        increment_version([*weights, *products])
        return
    for weight, mean, product, gradient in zip(*rows, strict=True):
        own = gradient.to(product.dtype) * (weight.to(product.dtype) - mean)
        product.add_(own) if add else product.copy_(own)
        weight.copy_(mean)


@torch.no_grad()
def ivon_all_(
    means: Row,  # μ
    momenta: Row,  # m
    curvatures: Row,  # h
    gradients: Row,
    products: Row,  # Σ gradient·(w − μ)
    prior: Numbers | Row,  # δ̃, one number for all, one for each, or a tensor for each
    prior_means: Row | None,  # μ₀, zero when None
    settings: Settings,
) -> None:
    """m ← b₁m + (1−b₁)ĝ,  h ← h + d + d²/2(h+δ̃) with d = (1−b₂)(ĥ−h),  μ ← μ − α·clip((m̄ + δ̃(μ−μ₀)) / (h+δ̃))."""
    if not means:
        return
    number, priors = (prior, None) if lists.is_number(prior) else (0.0, cast("Row", prior))
    each = _each(settings, number, len(means))
    rows = [means, momenta, curvatures, gradients, products]
    if call := lists.call("ivon", *rows, priors, prior_means):
        numbers = b"".join([pack("8d", *own) for own in each])
        call.kernel(*call[1:], numbers, _threads())
        increment_version([*means, *momenta, *curvatures])
        return
    for k, own in enumerate(each):
        own_priors = own[-1] if priors is None else priors[k]
        own_mean = None if prior_means is None else prior_means[k]
        state = means[k], momenta[k], curvatures[k]
        _ivon_twin(*state, gradients[k], products[k], own_priors, own_mean, *own[:-1])


def _each(settings: Settings, prior: Numbers, count: int) -> list[tuple[float, ...]]:
    """The settings and, last, the prior of every tensor."""
    rows = (lists.each(numbers, count) for numbers in (*settings, prior))
    return list(zip(*rows, strict=True))


def _ivon_twin(
    mean: Tensor,
    momentum: Tensor,
    curvature: Tensor,
    gradient: Tensor,
    product: Tensor,
    prior: float | Tensor,
    prior_mean: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    correction: float,
    radius: float,
    gradient_unit: float,
    product_unit: float,
) -> None:
    away = mean if prior_mean is None else mean - prior_mean
    momentum.mul_(beta1).add_(gradient, alpha=(1 - beta1) * gradient_unit)
    total = curvature + prior
    d = (product * total).mul_(product_unit).sub_(curvature).mul_(1 - beta2)
    curvature.add_(d).add_(d * (d / (2 * total))).clamp_(max=LARGEST)
    step = (momentum * correction + away * prior) / (curvature + prior)
    mean.sub_(lr * step.clamp_(-radius, radius))


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())
