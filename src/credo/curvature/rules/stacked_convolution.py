"""A convolution with a weight for each slice of the examples, as one call of a kernel.

Only the convolution itself and the gradient of its input see the weights: rᵢ depends on x and g alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.curvature.operation import Operation, Outputs, Pieces
from credo.curvature.rules.convolution import Convolution, movement
from credo.kernels.stacked_convolution import Flat, Pair, Stacked, stacked


class StackedConvolution(Operation):
    """`convolution` with `weights` (S, O, C, …) and `biases` (S, O) or None, and a kernel that suits them."""

    parameter_slots = frozenset({1, 2})
    name = "convolution"

    def __init__(self, convolution: Convolution, weights: Tensor, biases: Tensor | None, kernel: Stacked):
        self._inner, self._weights, self._biases, self._kernel = convolution, weights, biases, kernel
        self.tensors, self.lead = convolution.release(), convolution.lead

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        assert tensors[0] is not None
        return self._kernel(tensors[0], self._weights, self._biases), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g, x = grads[0], saved[0]
        assert g is not None
        _, *of_weights = self._inner.backward(grads, (False, *needed[1:]), examples, saved)
        return self._kernel.input_gradient(g, self._weights, x) if needed[0] else None, *of_weights


def as_one_call(operation: Convolution, weights: Tensor, biases: Tensor | None) -> StackedConvolution | None:
    """The convolution of examples that are cut into slices; None where no kernel suits it."""
    x, (stride, padding, dilation, groups) = operation.tensors[0], operation.arguments
    if operation.lead < 1 or isinstance(padding, str) or torch._C._is_any_autocast_enabled():
        return None
    assert x is not None
    _, at = movement(weights.shape[1:], stride, padding, dilation, groups)
    in_two = (_in_two(at.stride, 1), _in_two(at.padding, 0), _in_two(at.dilation, 1))
    kernel = stacked(x, weights, biases, Flat(*in_two, at.groups)) if x.dim() < 5 else None
    return StackedConvolution(operation, weights, biases, kernel) if kernel else None


def _in_two(sizes: Sequence[int], missing: int) -> Pair:
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])
