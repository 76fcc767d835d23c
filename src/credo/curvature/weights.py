"""Masks and weights between the losses of rows and the sum over them: what each element of a sum counts."""

from typing import Any

import torch
from torch import Tensor

from credo.curvature.flow_table import operation_name
from credo.curvature.layouts import Rows
from credo.curvature.tracing import Trace

_PASSED = frozenset(
    """Neg ToCopy Clone Alias View UnsafeView ReshapeAlias Squeeze Unsqueeze Permute Transpose T Expand Sum Mean""".split()
)
_FARTHEST = 16


def per_row_weights(trace: Trace, node: Any, own: int, layout: Rows) -> Tensor | None:
    """By what each element under a sum is multiplied; None where all rows count alike.

    The shape is that of the tensor that is summed, or of a part of it with the same rows.
    """
    shape = tuple(node._input_metadata[own].shape)
    weights: Tensor | None = None
    for _ in range(_FARTHEST):
        name, factor = operation_name(type(node)), None
        edges = [k for k, (child, _) in enumerate(node.next_functions) if child is not None]
        if (
            len(edges) != 1
            or trace.layout(node, own) != layout
            or tuple(node._input_metadata[own].shape) != shape
        ):
            break
        if name in ("Mul", "Div"):
            if name == "Div" and edges != [0]:
                break
            factor = node._saved_other if edges == [0] else node._saved_self
            if factor is None:
                break
            factor = factor.reciprocal() if name == "Div" else factor
        elif name == "Where":
            factor = node._saved_condition if edges == [0] else ~node._saved_condition
        elif name == "MaskedFill":
            factor = ~node._saved_mask
        elif name not in _PASSED and name not in ("Add", "Sub"):
            break
        if factor is not None and _varies(factor, shape, layout):
            new = factor.to(torch.float64).expand(shape) if factor.dim() <= len(shape) else None
            if new is None:
                break
            weights = new if weights is None else weights * new
        node, own = node.next_functions[edges[0]]
        if hasattr(node, "variable"):
            break
    return weights


def _varies(factor: Tensor, shape: tuple[int, ...], layout: Rows) -> bool:
    """Whether rows have factors of their own."""
    place = layout.axis - (len(shape) - factor.dim())
    if place < 0 or factor.shape[place] == 1:
        return False
    return not bool((factor == factor.narrow(place, 0, 1)).all())
