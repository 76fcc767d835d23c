"""Masks and weights between the losses of rows and the sum over them: what each element of a sum counts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from credo.curvature.flow_table import operation_name
from credo.curvature.layouts import Rows
from credo.curvature.tracing import LEAF, Trace

_PASSED = frozenset(("Neg", "ToCopy", "Clone", "Alias", "Add", "Sub", "View", "UnsafeView", "ReshapeAlias"))
_FARTHEST = 16


def readings(trace: Trace, node: Any, own: int, layout: Rows) -> Iterator[Tensor | None]:
    """Ways to read what is summed, as weights of losses: none first, then with one mask or weight after the other.

    (w * mask * loss).sum() is a sum of all, or of those in the mask. Weights have the shape of what is summed; factors
    that are the same for all rows are part of the losses.
    """
    shape = tuple(node._input_metadata[own].shape)
    weights: Tensor | None = None
    yield weights
    for _ in range(_FARTHEST):
        edges = [k for k, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(edges) != 1 or tuple(node._input_metadata[own].shape) != shape:
            return
        factor = _factor(node, operation_name(type(node)), edges[0])
        if factor is None:
            return
        if factor is not _ONE and _varies(factor, shape, layout):
            spread = factor.to(torch.float64).expand(shape)
            weights = spread if weights is None else weights * spread
            yield weights
        node, own = node.next_functions[edges[0]]
        if type(node) is LEAF or trace.layout(node, own) != layout:
            return


_ONE = torch.ones(())


def _factor(node: Any, name: str, edge: int) -> Tensor | None:
    """By what a node multiplies its only argument with a gradient; None if it does something else."""
    if name == "Mul":
        other: Tensor | None = node._saved_self if edge else node._saved_other
        return other
    found: Tensor | None = _ONE if name in _PASSED else None
    if name == "Div" and not edge:
        found = node._saved_other.reciprocal()
    elif name == "Where":
        found = ~node._saved_condition if edge else node._saved_condition
    elif name == "MaskedFill":
        found = ~node._saved_mask
    return found


def _varies(factor: Tensor, shape: tuple[int, ...], layout: Rows) -> bool:
    """Whether rows have factors of their own."""
    place = layout.axis - (len(shape) - factor.dim())
    if place < 0 or factor.shape[place] == 1:
        return False
    return not bool((factor == factor.narrow(place, 0, 1)).all())
