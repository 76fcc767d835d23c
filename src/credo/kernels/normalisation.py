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

CHUNK = 1 << 20  # bytes that the twin works on at a time
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
    weight = None if weight is None else weight.detach().to(wide_x.dtype)
    arguments = (wide_x, wide_g, weight, mean.to(wide_x.dtype), invstd.to(wide_x.dtype), training, need_input)
    kernel = None
    if x.device.type == "cpu" and x.numel():
        kernel = native.kernel(f"batch_norm_{native.suffix(wide_x.dtype)}")
    if kernel is None:
        gx, a, a_squares, b, b_squares = batch_norm_backward_twin(*arguments)
    else:
        gx, a, a_squares, b, b_squares = batch_norm_backward_native(kernel, *arguments)
    return gx if gx is None else gx.to(x.dtype), a, a_squares, b, b_squares


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
    affine = [t if t is None else t.contiguous() for t in (weight, mean, invstd)]
    gx = torch.empty_like(x) if need_input else None
    sums = x.new_empty(4, x.shape[1])
    shape = native.integers(*x.shape[:2], x[0, 0].numel(), *flat_strides(x), *flat_strides(g), training)
    tensors = [native.pointer(t) for t in (x, g, *affine, gx, sums)]
    threads = torch.get_num_threads()
    needed = kernel(shape, *tensors, native.pointer(None), threads)
    workspace = scratch("batch_norm", (needed // x.element_size(),), x)
    kernel(shape, *tensors, native.pointer(workspace), threads)
    return gx, sums[0], sums[1], sums[2], sums[3]


def alike(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the layout of x, which has no gaps, so that the input's gradient has the strides of x."""
    if torch.empty_like(x).stride() != x.stride():
        x = x.contiguous()
    same = (flat_strides(x)[1] == 1) == (flat_strides(g)[1] == 1)
    return x, g if same else torch.empty_like(x).copy_(g)


def batch_norm_backward_twin(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> Gradients:
    """The same in pure torch."""
    a, b = shares(x, g, mean, invstd)
    sums = a.sum(0), a.square().sum(0), b.sum(0), b.square().sum(0)
    return input_gradient(x, g, weight, mean, invstd, training) if need_input else None, *sums


def shares(x: Tensor, g: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """aᵢ and bᵢ, both (M, C), from as many examples at a time as fit the cache."""
    along, places = (-1, *[1] * (x.dim() - 2)), tuple(range(2, x.dim()))
    a, b = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:2])
    step = (
        max(1, CHUNK // max(1, x[:1].numel() * x.element_size()))
        if x.device.type == "cpu"
        else max(1, len(x))
    )
    for x_part, g_part, a_part, b_part in zip(*(torch.split(t, step) for t in (x, g, a, b)), strict=True):
        product = scratch_like(x_part)
        torch.sub(x_part, mean.view(along), out=product).mul_(g_part)
        a_part.copy_(product.sum(places) if places else product)
        b_part.copy_(g_part.sum(places) if places else g_part)
    return a.mul_(invstd), b


def scratch_like(x: Tensor) -> Tensor:
    """Scratch memory in the layout of x: mixed layouts are slow."""
    if x.dim() > 2 and x.stride(1) == 1:
        return scratch("normed", (len(x), *x.shape[2:], x.shape[1]), x).movedim(-1, 1)
    return scratch("normed", tuple(x.shape), x)


def input_gradient(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool
) -> Tensor:
    """gx: torch's own where batch statistics take part."""
    if training and x.numel():
        gradient: Tensor = torch.ops.aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, invstd, True, 0.0, [True, False, False]
        )[0]
        return gradient
    scale = invstd if weight is None else invstd * weight
    return g * scale.view(-1, *[1] * (x.dim() - 2))
