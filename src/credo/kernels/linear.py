"""The weight of a linear layer: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, n] = Σₜ gᵢ[t, o] · xᵢ[t, n]        t over the positions of one example

With one position an example, rᵢ² is an outer product of squares and both sums are matrix products. With more, the
layer is a convolution with a kernel of one place, channels last.
"""

import ctypes
from collections.abc import Callable
from struct import pack
from typing import final

import torch
from torch import Tensor, empty_like, get_num_threads

from credo.kernels import native
from credo.kernels.layout import widened
from credo.kernels.native import asked_for
from credo.kernels.prepared import Prepared
from credo.kernels.scratch import addresses, owned, scratch

SQUARED = 4 << 20  # bytes of squared x and g at a time
PREPARED = 6 << 20  # bytes of x and g, thrice, for two products at once
FEW = 1 << 20  # bytes of x and g whose squares the C library has memory at hand for
WORTH = 1 << 16  # multiplications, for which a second thread is woken
LINE = 16  # numbers: 64 bytes at least
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
    if not x.dtype is g.dtype in _NAMES:
        return _widened_sums
    fused = _fused(x, g)
    if fused is not None:
        return fused
    if g.dim() == 3:
        return _shared_products
    return SideBySide(x, g) if _suits_two_threads(x, g) else _products


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


def _suits_two_threads(x: Tensor, g: Tensor) -> bool:
    weights = x.shape[1] * g.shape[1]
    suits = len(x) * weights >= WORTH and weights <= FUSED and 3 * (x.nbytes + g.nbytes) <= PREPARED
    return x.is_cpu and torch.get_num_threads() == 2 and suits


@final
class SideBySide:
    """Two matrix products at once, each on a thread of its own: neither waits for the other thread midway.

    Of two rows long enough to be divided the first thread takes one and the second the other, here as there: each
    prepares what it multiplies. Half of it would else come from the other core, which takes longer than all the rest
    where they share no cache. Both results lie in one tensor.
    """

    def __init__(self, x: Tensor, g: Tensor):
        self._shapes, self._dtype = (g.shape, x.shape), x.dtype

    def __call__(self, x: Tensor, g: Tensor) -> _Sums:
        views = owned.views.get(self) or owned.make(self, 3 * (x.nbytes + g.nbytes), self._lay_out)
        if views is None:
            return _products(x, g)
        both, factors, both_g, both_x, transposed_g = views
        both_g.copy_(g)
        both_x.copy_(x)
        torch.mul(both, factors, out=both)
        bias_total, bias_squares = both_g.sum(1).unbind()
        total, squares = torch.bmm(transposed_g, both_x).unbind()
        return total, squares, bias_total, bias_squares

    def _lay_out(self) -> tuple[Tensor, ...]:
        """Rows for g and x, one behind the other: ones, what stays as it is, and what is squared.

        The last two are `both`, and their `factors` the first and the last.
        """
        of_g, of_x = (shape.numel() for shape in self._shapes)
        rows = torch.ones(3, -(-(of_g + of_x) // LINE) * LINE, dtype=self._dtype)[:, : of_g + of_x]
        both, factors = rows[1:], rows[::2]
        both_g = both[:, :of_g].view(2, *self._shapes[0])
        both_x = both[:, of_g:].view(2, *self._shapes[1])
        return both, factors, both_g, both_x, both_g.mT


def _products(x: Tensor, g: Tensor) -> _Sums:
    """By two matrix products; the squares, where there are many, in scratch memory, a few MB at a time."""
    if x.nbytes + g.nbytes <= FEW:
        squared_g = g * g
        return torch.mm(g.T, x), torch.mm(squared_g.T, x * x), g.sum(0), squared_g.sum(0)
    squares, bias_squares = g.new_empty((g.shape[1], x.shape[1])), g.new_empty(g.shape[1])
    step = max(1, SQUARED // max(1, (x.shape[1] + g.shape[1]) * x.element_size()))
    some_x, some_g = (x, g) if len(x) <= step else (x[:step], g[:step])
    squared_g = squared(some_g, "g")
    torch.mm(squared_g.T, squared(some_x, "x"), out=squares)
    torch.sum(squared_g, 0, out=bias_squares)
    for i in range(step, len(x), step):
        squared_g = squared(g[i : i + step], "g")
        squares.addmm_(squared_g.T, squared(x[i : i + step], "x"))
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
