"""BatchNorm backward: Σᵢ and Σᵢ² of the affine parameters' gradients, with the input's gradient from the same pass.

    x̂ = (x − mean)·invstd        aᵢ = Σₚ x̂ᵢₚ gᵢₚ (weight)        bᵢ = Σₚ gᵢₚ (bias)        p over positions, n = M·P
    training:  gx = weight·invstd·(g − Σᵢbᵢ/n − x̂·Σᵢaᵢ/n)        eval:  gx = weight·invstd·g

x̂ comes from the input, never from the output divided by the weight, which may be zero.
"""

from struct import pack

import torch
from torch import Tensor

from credo.kernels import accelerator, native
from credo.kernels.layout import flat_strides, readable, widened
from credo.kernels.prepared import Prepared
from credo.kernels.scratch import is_worth_space, scratch, spacious, workspace

CHUNK = 1 << 20  # bytes that plain torch works on at a time
Gradients = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]


def batch_norm(
    x: Tensor,  # (M, C, *S)
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own: the output, which most networks soon drop, and in training mean and invstd of the batch.

    With `out=` torch forgets the mean of inputs with gaps between their elements.
    """
    numbers = (x, *affine, *running, training, momentum, eps)
    if x.dtype not in (torch.float32, torch.float64) or not is_worth_space(x):
        return torch.native_batch_norm(*numbers)
    out, mean, invstd = spacious(x), x.new_empty(0), x.new_empty(0)
    return torch.native_batch_norm(*numbers, out=(out, mean, invstd))


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
    affine = weight, mean, invstd
    if plan := _plan(x, g, training, *affine):
        return plan(x, g, *affine, need_input)
    wide_x, wide_g = widened(x, g)
    if not x.is_cpu:
        given = (wide_x, wide_g, *affine, training, need_input)
        gx, *sums = accelerator.run("batch_norm_backward", *given)
        return gx if gx is None else gx.to(x.dtype), *sums
    affine = tuple(t if t is None else t.detach().to(wide_x.dtype).contiguous() for t in affine)  # type: ignore[assignment]
    if _kernel(wide_x) is not None:
        wide_x, wide_g = alike(readable(wide_x), readable(wide_g))
    if plan := _plan(wide_x, wide_g, training, *affine):
        gx, *sums = plan(wide_x, wide_g, *affine, need_input)
    else:
        gx, *sums = batch_norm_backward_reference(wide_x, wide_g, *affine, training, need_input)
    return gx if gx is None else gx.to(x.dtype), *sums


def _kernel(x: Tensor) -> native.Kernel | None:
    return native.kernel(f"batch_norm_{native.suffix(x.dtype)}") if x.is_cpu and x.numel() else None


class NormalisationCall:
    """The C++ kernel for inputs and gradients of one size and layout, both channels first or both channels last."""

    def __init__(self, kernel: native.Kernel, x: Tensor, g: Tensor, training: bool):
        self._kernel, self._threads = kernel, torch.get_num_threads()
        places = x[0, 0].numel()
        self._shape = native.integers(*x.shape[:2], places, *flat_strides(x), *flat_strides(g), training)
        self._sums = (4, x.shape[1])
        self._empty = spacious if is_worth_space(x) else torch.empty_like
        self._scratch = kernel(self._shape, pack("8P", *[0] * 8), self._threads) // x.element_size()

    def __call__(
        self, x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, need_input: bool
    ) -> Gradients:
        gx, sums = self._empty(x) if need_input else None, x.new_empty(self._sums)
        tensors = pack(
            "8P",
            x.data_ptr(),
            g.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            mean.data_ptr(),
            invstd.data_ptr(),
            0 if gx is None else gx.data_ptr(),
            sums.data_ptr(),
            workspace("batch_norm", self._scratch, x),
        )
        self._kernel(self._shape, tensors, self._threads)
        return gx, *sums.unbind()  # type: ignore[return-value]


def _planned(x: Tensor, g: Tensor, training: bool) -> NormalisationCall | None:
    """Where the kernel can take x and g as they are."""
    if x.dtype not in (torch.float32, torch.float64) or (kernel := _kernel(x)) is None:
        return None
    readable_x, readable_g = alike(readable(x), readable(g))
    return NormalisationCall(kernel, x, g, training) if readable_x is x and readable_g is g else None


_prepared = Prepared(_planned)


def _plan(
    x: Tensor, g: Tensor, training: bool, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> NormalisationCall | None:
    dtype = x.dtype
    if weight is not None and not (weight.dtype is dtype and weight.is_contiguous()):
        return None
    if not (
        g.dtype is dtype is mean.dtype is invstd.dtype and mean.is_contiguous() and invstd.is_contiguous()
    ):
        return None
    return _prepared.get((x.shape, x.stride(), dtype, x.is_cpu, g.stride(), training), x, g, training)


def alike(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the layout of x, which has no gaps, so that the input's gradient has the strides of x."""
    if torch.empty_like(x).stride() != x.stride():
        x = x.contiguous()
    same = (flat_strides(x)[1] == 1) == (flat_strides(g)[1] == 1)
    return x, g if same else torch.empty_like(x).copy_(g)


def batch_norm_backward_reference(
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
