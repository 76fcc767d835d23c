"""BatchNorm backward: Σᵢ and Σᵢ² of the affine parameters' gradients, with the input's gradient from the same pass.

    x̂ = (x − mean)·invstd        aᵢ = Σₚ x̂ᵢₚ gᵢₚ (weight)        bᵢ = Σₚ gᵢₚ (bias)        p over positions, n = M·P
    training:  gx = weight·invstd·(g − Σᵢbᵢ/n − x̂·Σᵢaᵢ/n)        eval:  gx = weight·invstd·g

x̂ comes from the input, never from the output divided by the weight, which may be zero.
"""

import torch
from torch import Tensor

Sums = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]


def batch_norm_backward(
    x: Tensor,  # (M, C, *S)
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> Sums:
    """(gx or None, Σaᵢ, Σaᵢ², Σbᵢ, Σbᵢ²)."""
    return batch_norm_backward_twin(x, g, weight, mean, invstd, training, need_input)


def batch_norm_backward_twin(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool, need_input: bool
) -> Sums:
    """The same in pure torch."""
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    dtype = torch.promote_types(torch.promote_types(x.dtype, g.dtype), torch.float32)
    x, g, mean, invstd = (t.detach().to(dtype) for t in (x, g, mean, invstd))
    shares = (((x - mean.view(per_channel)) * g).flatten(2).sum(2) * invstd, g.flatten(2).sum(2)) if x.dim() > 2 else (((x - mean) * invstd * g), g)
    (a, b) = shares
    sums = (a.sum(0), a.square().sum(0), b.sum(0), b.square().sum(0))
    if not need_input:
        return None, *sums
    scale = invstd if weight is None else invstd * weight.detach()
    if not training:
        return g * scale.view(per_channel), *sums
    n = x.numel() // x.shape[1]
    slope = -scale * invstd * sums[0] / n
    shift = -scale * sums[2] / n - slope * mean
    gx = g * scale.view(per_channel) + x * slope.view(per_channel) + shift.view(per_channel)
    return gx, *sums
