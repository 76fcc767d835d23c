"""BatchNorm backward: Σᵢ and Σᵢ² of the affine parameters' gradients, with the input's gradient from the same pass.

    x̂ = (x − mean)·invstd        aᵢ = Σₚ x̂ᵢₚ gᵢₚ (weight)        bᵢ = Σₚ gᵢₚ (bias)        p over positions, n = M·P
    training:  gx = weight·invstd·(g − Σᵢbᵢ/n − x̂·Σᵢaᵢ/n)        eval:  gx = weight·invstd·g

x̂ comes from the input, never from the output divided by the weight, which may be zero.
"""

import torch
from torch import Tensor

from credo.kernels import native
from credo.kernels.layout import flat_strides, readable, widened
from credo.kernels.scratch import scratch

Gradients = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]


def batch_norm_backward(
    x: Tensor,  # (M, C, *S)
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> Gradients:
    """(gx or None, Σaᵢ, Σaᵢ², Σbᵢ, Σbᵢ²); gx has the type of x, the sums float32 at least."""
    wide_x, wide_g = widened(x, g)
    affine = [None if t is None else t.detach().to(wide_x.dtype) for t in (weight, mean, invstd)]
    kernel = None
    if x.device.type == "cpu" and x.numel():
        kernel = native.kernel(f"batch_norm_{native.suffix(wide_x.dtype)}")
    if kernel is None:
        gx, *sums = batch_norm_backward_twin(wide_x, wide_g, *affine, training, need_input)
    else:
        gx, *sums = batch_norm_backward_native(kernel, wide_x, wide_g, *affine, training, need_input)
    return gx if gx is None else gx.to(x.dtype), *sums


def batch_norm_backward_native(
    kernel: native.Kernel,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> Gradients:
    """The C++ kernel. x and g may both be channels first or both channels last."""
    x, g = alike(readable(x), readable(g))
    gx = torch.empty_like(x) if need_input else None
    sums = x.new_empty(4, x.shape[1])
    shape = native.integers(*x.shape[:2], x[0, 0].numel(), *flat_strides(x), *flat_strides(g), training)
    tensors = [native.pointer(t) for t in (x, g, *(t if t is None else t.contiguous() for t in (weight, mean, invstd)), gx, sums)]
    threads = torch.get_num_threads()
    needed = kernel(shape, *tensors, native.pointer(None), threads)
    kernel(shape, *tensors, native.pointer(scratch("batch_norm", (needed // x.element_size(),), x)), threads)
    return gx, *sums.unbind()


def alike(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the layout of x, which has no gaps, so that the input's gradient has the strides of x."""
    if not torch.empty_like(x).stride() == x.stride():
        x = x.contiguous()
    same = (flat_strides(x)[1] == 1) == (flat_strides(g)[1] == 1)
    return x, g if same else torch.empty_like(x).copy_(g)


def batch_norm_backward_twin(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool, need_input: bool
) -> Gradients:
    """The same in pure torch."""
    def along(v: Tensor) -> Tensor:
        return v.view(1, -1, *[1] * (x.dim() - 2))

    places = tuple(range(2, x.dim()))
    centred = x - along(mean)
    a = torch.mul(centred, g)
    a, b = (t.sum(places) if places else t for t in (a, g))
    a = a * invstd
    total_a, total_b = a.sum(0), b.sum(0)
    sums = (total_a, a.square().sum(0), total_b, b.square().sum(0))
    if not need_input:
        return None, *sums
    scale = invstd if weight is None else invstd * weight
    gx = g * along(scale)
    if training:
        n = max(1, x.numel() // x.shape[1])
        gx.addcmul_(centred, along(scale * invstd * total_a / n), value=-1).sub_(along(scale * total_b / n))
    return gx, *sums
