"""Where the examples of a batch are put together: the places, from the loss down, at which they were still apart.

Above such a place all examples are in every number, and the graph must be linear: else the loss is no sum Σᵢ cᵢ·lᵢ.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.curvature.flow_table import operation_name
from credo.curvature.layouts import Batch, Rows, Single
from credo.curvature.reduction_errors import not_linear
from credo.curvature.tracing import Trace
from credo.errors import UnsupportedOperation

_NAMES = """
Add Sub Rsub Neg Mul Div Sum Mean Nansum Dot Vdot Mv Mm Where MaskedFill
View UnsafeView ReshapeAlias Unsqueeze Squeeze Expand Repeat Permute Transpose T
Select Slice Stack Cat Index IndexSelect Unbind Split ToCopy Clone Alias
"""
_LINEAR = frozenset(_NAMES.split())
_BILINEAR = frozenset(("Mul", "Dot", "Vdot", "Mv", "Mm"))
LOSSES = frozenset(
    (
        *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
    )
)


class Place(NamedTuple):
    """Where examples meet: an argument of a node (−1: the node's own result), and the gradient that arrives there."""

    node: Any
    argument: int
    grad: Tensor
    layout: Rows | Single
    divisors: frozenset[float]  # by which everything was divided on the way

    @property
    def is_number(self) -> bool:
        """Whether it is the number of one example."""
        return isinstance(self.layout, Single) and self.argument < 0


def places_of(trace: Trace, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> list[Place]:
    """All places, from the root down, at which examples that were apart are put together."""
    found: list[Place] = []
    arrived: dict[Any, _Arrived] = {}
    for root, seed in zip(roots, seeds, strict=True):
        node, grad = root.grad_fn, torch.ones_like(root) if seed is None else seed
        if node is None:
            continue
        layout = trace.layout(node, root.output_nr)
        if isinstance(layout, (Rows, Single)):
            found.append(Place(node, -1, grad, layout, frozenset()))
        elif isinstance(layout, Batch):
            _arrive(arrived, node, root.output_nr, grad, frozenset())
    while arrived:
        node = max(arrived, key=lambda n: n._sequence_nr())
        _descend(trace, node, arrived.pop(node), arrived, found)
    return found


class _Arrived:
    """What has come to a node from above: gradients of its results, and the numbers that divided them."""

    def __init__(self) -> None:
        self.grads: dict[int, Tensor] = {}
        self.divisors: frozenset[float] = frozenset()


def _descend(
    trace: Trace, node: Any, own: _Arrived, arrived: dict[Any, _Arrived], found: list[Place]
) -> None:
    """Through one node of the part in which all examples are together."""
    name, layouts, grads, divisors = (
        operation_name(type(node)),
        trace.arguments(node),
        own.grads,
        own.divisors,
    )
    apart = [k for k, layout in enumerate(layouts) if isinstance(layout, (Rows, Single))]
    grad = grads[0] if list(grads) == [0] else None
    if apart and (name in LOSSES or name.startswith(("NllLoss", "Sum", "Mean"))) and grad is not None:
        found.append(Place(node, apart[0], grad, layouts[apart[0]], divisors))  # type: ignore[arg-type]
        return
    sources = sum(child is not None for child, _ in node.next_functions)
    bilinear = (
        name in _BILINEAR or (name == "Div" and node.next_functions[1][0] is not None)
    ) and sources > 1
    if name in ("Dot", "Vdot") and apart and grad is not None:
        found.append(Place(node, apart[0], grad, layouts[apart[0]], divisors))  # type: ignore[arg-type]
        return
    if name not in _LINEAR or bilinear or (name == "Div" and node.next_functions[1][0] is not None):
        raise UnsupportedOperation(not_linear(node.name()))
    if name == "Div" and node._saved_other.numel() == 1:
        divisors |= {abs(float(node._saved_other))}
    back = node(*[grads.get(k) for k in range(len(node._input_metadata))])
    for k, sent in enumerate(back if isinstance(back, tuple) else (back,)):
        if k >= len(layouts) or sent is None:
            continue
        child, place = node.next_functions[k]
        if isinstance(layouts[k], Batch):
            _arrive(arrived, child, place, sent, divisors)
        elif layouts[k] is not None:
            found.append(Place(child, -1, sent, layouts[k], divisors))  # type: ignore[arg-type]


def _arrive(
    arrived: dict[Any, _Arrived], node: Any, own: int, grad: Tensor, divisors: frozenset[float]
) -> None:
    there = arrived.setdefault(node, _Arrived())
    there.grads[own] = there.grads[own] + grad if own in there.grads else grad.detach()
    there.divisors |= divisors
