"""The weight of a linear layer: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, n] = Σₜ gᵢ[t, o] · xᵢ[t, n]        t over the positions of one example

With one position an example, rᵢ² is an outer product of squares and both sums are matrix products. With more, the
layer is a convolution with a kernel of one place, channels last.
"""

import ctypes

import torch
from torch import Tensor

from credo.kernels import native
from credo.kernels.layout import widened
from credo.kernels.scratch import scratch

SQUARED = 4 << 20  # bytes of squared x and g at a time
FUSED = 3 << 20  # multiplications: beyond, the library's matrix products are faster


def row_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """gᵀx and (g²)ᵀ(x²), both (O, I), from x (M, I) and g (M, O)."""
    return layer_sums(x, g)[:2]


def layer_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`row_sums`, and those of the bias: Σᵢgᵢ and Σᵢgᵢ², both (O)."""
    x, g = widened(x, g)
    if x.device.type == "cpu" and 0 < x.numel() * g.shape[1] < FUSED:
        kernel = native.kernel(f"row_sums_{native.suffix(x.dtype)}")
        if kernel is not None:
            return _fused(kernel, x.contiguous(), g.contiguous())
    return *_products(x, g), g.sum(0), g.square().sum(0)


def _fused(kernel: native.Kernel, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The C++ kernel, which reads x and g once for all four sums."""
    (examples, inputs), outputs = x.shape, g.shape[1]
    sums = [g.new_empty(outputs, inputs) for _ in range(2)] + [g.new_empty(outputs) for _ in range(2)]
    at = [t.data_ptr() for t in (x, g, *sums)]
    sizes, threads = native.integers(examples, inputs, outputs), ctypes.c_int64(torch.get_num_threads())
    size = kernel((ctypes.c_void_p * 7)(*at, None), sizes, threads) // x.element_size()
    memory = scratch("row sums", (size,), x)
    kernel((ctypes.c_void_p * 7)(*at, memory.data_ptr()), sizes, threads)
    total, squares, bias_total, bias_squares = sums
    return total, squares, bias_total, bias_squares


def _products(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """By two matrix products, with the squares in scratch memory, a few MB at a time."""
    total, squares = torch.mm(g.T, x), None
    step = max(1, SQUARED // max(1, (x.shape[1] + g.shape[1]) * x.element_size()))
    for i in range(0, max(1, len(x)), step):
        squared_g, squared_x = squared(g[i : i + step], "g"), squared(x[i : i + step], "x")
        squares = (
            torch.mm(squared_g.T, squared_x) if squares is None else squares.addmm_(squared_g.T, squared_x)
        )
    assert squares is not None
    return total, squares


def squared(t: Tensor, name: str) -> Tensor:
    """t² in scratch memory."""
    return torch.mul(t, t, out=scratch(f"squared {name}", tuple(t.shape), t))


def sequence_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²), both (O, I), from x (M, T, I) and g (M, T, O)."""
    from credo.kernels.convolution import weight_sums  # which needs `row_sums` above

    total, squares = weight_sums(x.mT, g.mT, (1,), (1,), (0,), (1,), 1)
    return total.squeeze(2), squares.squeeze(2)
