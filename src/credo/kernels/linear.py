"""The weight of a linear layer: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, n] = Σₜ gᵢ[t, o] · xᵢ[t, n]        t over the positions of one example

With one position an example, rᵢ² is an outer product of squares and both sums are matrix products. With more, the
layer is a convolution with a kernel of one place, channels last.
"""

import ctypes
from collections.abc import Callable
from struct import pack

import torch
from torch import Tensor, empty_like, get_num_threads

from credo.kernels import accelerator, native
from credo.kernels.layout import widened
from credo.kernels.native import asked_for
from credo.kernels.prepared import Prepared
from credo.kernels.scratch import addresses, scratch

SQUARED = 4 << 20  # bytes of squared x and g at a time
FUSED = (
    1 << 19
)  # weights: beyond, their sums leave a core's cache, and two products by the library are as fast
_NAMES = {torch.float32: "row_sums_f32", torch.float64: "row_sums_f64"}
_Sizes = tuple[int, int, int, int]  # S, M, I, O
_Sums = tuple[Tensor, Tensor, Tensor, Tensor]


def row_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """gᵀx and (g²)ᵀ(x²), both (O, I), from x (M, I) and g (M, O)."""
    return layer_sums(x, g)[:2]


def layer_sums(x: Tensor, g: Tensor) -> _Sums:
    """`row_sums`, and those of the bias: Σᵢgᵢ and Σᵢgᵢ², both (O).

    g may be (S, M, O), of S samples that all see the one x: the sums then run over samples too.
    """
    key = (x.shape, g.shape, x.dtype, g.dtype, x.is_cpu, asked_for(), get_num_threads())
    way = _ways.known.get(key) or _ways.add(key, x, g)
    assert way is not None  # there is one for every kind
    return way(x, g)


def _way(x: Tensor, g: Tensor) -> Callable[[Tensor, Tensor], _Sums]:
    """The fastest for tensors like these."""
    if not x.is_cpu and g.dim() == 2:
        return _elsewhere
    if not x.dtype is g.dtype in _NAMES:
        return _widened_sums
    fused = _fused(x, g)
    if fused is not None:
        return fused
    return _shared_products if g.dim() == 3 else _products


class Fused:
    """The C++ kernel, which reads x and g once for all four sums, for layers of one size: what calls have in common."""

    def __init__(self, kernel: native.Kernel, sizes: _Sizes, threads: int, dtype: torch.dtype):
        *_, inputs, outputs = sizes
        self._kernel, self._sizes, self._threads = kernel, native.integers(*sizes), ctypes.c_int64(threads)
        number = torch.empty((), dtype=dtype)
        # One number in the shapes of the results: empty tensors like others are made faster than by shape.
        self._weight, self._bias = number.expand(outputs, inputs), number.expand(outputs)
        # Without memory the kernel only says how much of it it needs.
        self._scratch = kernel(pack("7P", *[0] * 7), self._sizes, self._threads) // dtype.itemsize

    def __call__(self, x: Tensor, g: Tensor) -> _Sums:
        x, g, weight, bias = x.contiguous(), g.contiguous(), self._weight, self._bias
        total, squares = empty_like(weight), empty_like(weight)
        bias_total, bias_squares = empty_like(bias), empty_like(bias)
        tensors = (x, g, total, squares, bias_total, bias_squares)
        key = ("row sums", x.dtype, self._scratch)
        memory = addresses.known.get(key) or addresses.make("row sums", self._scratch, x)
        self._kernel(pack("7P", *map(Tensor.data_ptr, tensors), memory), self._sizes, self._threads)
        return total, squares, bias_total, bias_squares


def _fused(x: Tensor, g: Tensor) -> Fused | None:
    """For layers of these sizes, where it is the faster way."""
    (examples, inputs), outputs = x.shape, g.shape[-1]
    suits = x.is_cpu and examples > 0 and 0 < inputs * outputs <= FUSED and x.dtype is g.dtype in _NAMES
    if not suits or (kernel := native.kernel(_NAMES[x.dtype])) is None:
        return None
    sizes = (1 if g.dim() == 2 else len(g), examples, inputs, outputs)
    return Fused(kernel, sizes, torch.get_num_threads(), x.dtype)


_ways = Prepared(_way)


def _widened_sums(x: Tensor, g: Tensor) -> _Sums:
    return layer_sums(*widened(x, g))


def _elsewhere(x: Tensor, g: Tensor) -> _Sums:
    return accelerator.run("row_sums", x, g)  # type: ignore[no-any-return]


def _products(x: Tensor, g: Tensor) -> _Sums:
    """By two matrix products; the squares in scratch memory, a few MB at a time."""
    squares, bias_squares = g.new_zeros((g.shape[1], x.shape[1])), g.new_zeros(g.shape[1])
    step = max(1, SQUARED // max(1, (x.shape[1] + g.shape[1]) * x.element_size()))
    for some_x, some_g in zip(torch.split(x, step), torch.split(g, step), strict=True):
        squared_g = squared(some_g, "g")
        squares.addmm_(squared_g.T, squared(some_x, "x"))
        bias_squares += squared_g.sum(0)
    return torch.mm(g.T, x), squares, g.sum(0), bias_squares


def _shared_products(x: Tensor, g: Tensor) -> _Sums:
    """Σₛgₛ and Σₛgₛ² first: x then meets them once."""
    of_g, of_squares = g.sum(0), squared(g, "g").sum(0)
    return torch.mm(of_g.T, x), torch.mm(of_squares.T, squared(x, "x")), of_g.sum(0), of_squares.sum(0)


def squared(t: Tensor, name: str) -> Tensor:
    """t² in scratch memory."""
    return torch.mul(t, t, out=scratch(f"squared {name}", tuple(t.shape), t))


def sequence_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²), both (O, I), from x (M, T, I) and g (M, T, O)."""
    from credo.kernels.convolution import weight_sums  # which needs `row_sums` above

    total, squares = weight_sums(x.mT, g.mT, (1,), (1,), (0,), (1,), 1)
    return total.squeeze(2), squares.squeeze(2)
