"""The weight of a linear layer: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, n] = Σₜ gᵢ[t, o] · xᵢ[t, n]        t over the positions of one example

With one position an example, rᵢ² is an outer product of squares and both sums are matrix products. With more, the
layer is a convolution with a kernel of one place, channels last.
"""

import torch
from torch import Tensor

from credo.kernels.layout import widened
from credo.kernels.scratch import scratch

SQUARED = 4 << 20  # bytes of squared x and g at a time


def row_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """gᵀx and (g²)ᵀ(x²), both (O, I), from x (M, I) and g (M, O)."""
    x, g = widened(x, g)
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
