"""The weight of a linear layer: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, n] = Σₜ gᵢ[t, o] · xᵢ[t, n]        t over the positions of one example

With one position an example, rᵢ² is an outer product of squares and both sums are matrix products. With more, the
layer is a convolution with a kernel of one place, channels last.
"""

import torch
from torch import Tensor

from credo.kernels.layout import widened
from credo.kernels.scratch import scratch


def row_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """gᵀx and (g²)ᵀ(x²), both (O, I), from x (M, I) and g (M, O)."""
    x, g = widened(x, g)
    squared_x = torch.mul(x, x, out=scratch("squared x", tuple(x.shape), x))
    squared_g = torch.mul(g, g, out=scratch("squared g", tuple(g.shape), g))
    return torch.mm(g.T, x), torch.mm(squared_g.T, squared_x)


def sequence_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²), both (O, I), from x (M, T, I) and g (M, T, O)."""
    from credo.kernels.convolution import weight_sums  # which needs `row_sums` above

    total, squares = weight_sums(x.mT, g.mT, (1,), (1,), (0,), (1,), 1)
    return total.squeeze(2), squares.squeeze(2)
