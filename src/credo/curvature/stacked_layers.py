"""A layer with many weights as one call: a linear layer as one batched product, a convolution as one call of a kernel.

With gₖᵢ the gradient of sample k and example i, and x the same for all k, as in the first layer of vectorised samples,
the sums over samples come first:

    Σ rₖᵢ = (Σₖ gₖ)ᵀ x        Σ rₖᵢ² = (Σₖ gₖ²)ᵀ (x²)

so that the weight costs what it costs for one sample, and the input is never repeated.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, Sums, widen
from credo.curvature.rules.convolution import Convolution, movement
from credo.curvature.rules.linear import OuterProducts, bias_gradient
from credo.curvature.torch_private import is_any_autocast_enabled
from credo.kernels import linear as kernel
from credo.kernels.stacked_convolution import Flat, Pair, PlannedStack, stacked


@final
class SharedProducts(PerExampleGradient):
    """rₖᵢ = gₖᵢ xᵢᵀ, from x (M, I) and g (K, M, O); example number k·M + i."""

    def __init__(self, x: Tensor, g: Tensor):
        self._x, self._g, self.examples = x, g, len(g) * len(x)

    def total(self) -> Tensor:
        return self._g.sum(0).T @ self._x

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return kernel.layer_sums(self._x, self._g)[:2]

    def per_example(self, start: int, stop: int) -> Tensor:
        x, g = widen(self._x), widen(self._g)
        at = torch.arange(start, stop, device=x.device) % len(x)
        return g.flatten(0, 1)[start:stop].unsqueeze(2) * x[at].unsqueeze(1)


class StackedLinear(Operation):
    """tensors: x, weight, bias; `weights` (K, O, I), `biases` (K, O) or None.

    Rows of x (K, M, I), or (N, I) sample after sample, have a weight each, and the result is shaped like x; samples
    differ by one row at most, the larger ones first. Of a `common` x (M, I), which needs no gradient, the result is
    (K, M, O).
    """

    parameter_slots = frozenset({1, 2})
    name = "linear"

    def __init__(
        self, tensors: tuple[Tensor | None, ...], weights: Tensor, biases: Tensor | None, common: bool = False
    ):
        self.tensors = tensors
        self._weights, self._biases, self._common = weights, biases, common
        assert tensors[0] is not None
        self.lead = tensors[0].shape[:-1].numel() * (len(weights) if common else 1)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        x, columns = tensors[0], self._weights.transpose(1, 2)
        assert x is not None
        if self._common:
            return _product(x.expand(len(columns), *x.shape), columns, self._biases), ()
        out = _by_sample(x.flatten(0, -2), columns, self._biases)
        return out.view(*x.shape[:-1], out.shape[-1]), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, rows = saved[0].to(g.dtype), g.flatten(0, -2)
        weight = SharedProducts(x, g) if self._common else OuterProducts(x.flatten(0, -2), rows)
        return (
            self._input_gradient(rows, x.shape) if needed[0] else None,
            weight if needed[1] else None,
            bias_gradient(rows) if needed[2] else None,
        )

    def sums(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Sums | None:
        if len(self.watched_keys) < 2 or not (needed[1] and needed[2]):
            return None
        g = grads[0]
        assert g is not None
        x, rows = saved[0].to(g.dtype), g.flatten(0, -2)
        gx = self._input_gradient(rows, x.shape) if needed[0] else None
        x, g = (x, g) if self._common else (x.flatten(0, -2), rows)
        total, squares, bias_total, bias_squares = kernel.layer_sums(x, g)
        return (gx, total, bias_total), (squares, bias_squares)

    def _input_gradient(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return _by_sample(rows, self._weights.to(rows.dtype)).view(shape)


def _by_sample(rows: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
    """(N, I) by (K, I, O), sample after sample: one batched product, or two where samples differ by a row."""
    each, larger = divmod(len(rows), len(matrices))
    if not larger:
        return _product(rows.reshape(len(matrices), each, -1), matrices, biases).flatten(0, 1)
    parts = rows.tensor_split([larger * (each + 1)]), matrices.tensor_split([larger])
    added = (None, None) if biases is None else biases.tensor_split([larger])
    some = [_by_sample(*part) for part in zip(*parts, added, strict=True) if len(part[0])]
    return some[0] if len(some) == 1 else torch.cat(some)


def _product(rows: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
    return torch.bmm(rows, matrices) if biases is None else torch.baddbmm(biases.unsqueeze(1), rows, matrices)


# ────────────────────────────────────────
# A convolution with a weight for each slice of the examples, as one call of a kernel.
#
# Only the convolution itself and the gradient of its input see the weights: rᵢ depends on x and g alone.


class StackedConvolution(Operation):
    """`convolution` with `weights` (S, O, C, …) and `biases` (S, O) or None, and a kernel that suits them."""

    parameter_slots = frozenset({1, 2})
    name = "convolution"

    def __init__(
        self, convolution: Convolution, weights: Tensor, biases: Tensor | None, kernel: PlannedStack
    ):
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
    if operation.lead < 1 or isinstance(padding, str) or is_any_autocast_enabled():
        return None
    assert x is not None
    _, at = movement(weights.shape[1:], stride, padding, dilation, groups)
    in_two = (_in_two(at.stride, 1), _in_two(at.padding, 0), _in_two(at.dilation, 1))
    kernel = stacked(x, weights, biases, Flat(*in_two, at.groups)) if x.dim() < 5 else None
    return StackedConvolution(operation, weights, biases, kernel) if kernel else None


def _in_two(sizes: Sequence[int], missing: int) -> Pair:
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])
