"""Follows the examples through the graph of a loss, from the watched operations to the root.

Row i of a watched operation's result is example i. Every operation after it, up to the loss, must keep the examples
apart, or what comes back to row i is not example i's gradient. Statistics of the batch (a mean over the examples that
is subtracted from each of them) count as those of BatchNorm do.
"""

from collections.abc import Sequence
from typing import Any

import torch

from credo.curvature.accumulate import Watched
from credo.curvature.flow_lookup import (
    flow_of,
    keeps_apart,
    probed,
)
from credo.curvature.flows import Mixed, same
from credo.curvature.layouts import Layout, Rows, WholeBatch
from credo.curvature.rule import Operation
from credo.curvature.rules import Generic
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.rules.recurrent import Recurrent
from credo.curvature.torch_private import (
    creation_order,
    node_type,
    results_of,
)
from credo.curvature.tracking import Derived
from credo.errors import UnsupportedOperation

_WATCHED = node_type(Watched)
DERIVED = node_type(Derived)
LEAF: Any = type(torch.ones(1, requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
_TRUSTED = ("CheckpointFunctionBackward",)  # runs its own pass through what it holds, which is followed then


class Trace:
    """The layouts of all results in a graph."""

    def __init__(
        self,
        nodes: Sequence[Any],
        examples: int,
        samples: int = 1,
        known: "tuple[Sequence[Any], Sequence[Layout | list[Layout]]] | None" = None,
    ):
        self.examples = examples
        self.samples = samples  # in front of the examples, where several are computed at once
        # Layouts that are known already are looked up only if they are asked for.
        self._layouts: dict[Any, Layout | list[Layout]] = {}
        self._known = known
        if known is not None:
            return
        for node in sorted((n for n in nodes if n is not None), key=creation_order):
            if node not in self._layouts:
                self._visit(node)

    def shape(self, node: Any, argument: int) -> Sequence[int]:
        child, own = node.next_functions[argument]
        shape: Sequence[int] = child.variable.shape if type(child) is LEAF else results_of(child)[own].shape
        return shape

    def result(self, node: Any, own: int = 0) -> Sequence[int]:
        shape: Sequence[int] = results_of(node)[own].shape
        return shape

    def layout(self, node: Any, own: int = 0) -> Layout:
        """Of one result."""
        if node is None:
            return None
        if self._known is not None:
            self._layouts.update(zip(*self._known, strict=True))
            self._known = None
        if node not in self._layouts:
            self._visit(node)
        found = self._layouts[node]
        return found[own] if isinstance(found, list) else found

    def result_layouts(self, node: Any) -> "Layout | list[Layout]":
        """Of all results of a node."""
        return None if node is None else self._layouts[node]

    def arguments(self, node: Any) -> list[Layout]:
        return [self.layout(child, own) for child, own in node.next_functions]

    def _visit(self, node: Any) -> None:
        waiting, known = [node], self._layouts
        while waiting:  # children of another thread may come later in the order
            last = waiting[-1]
            kind = type(last)
            if kind is LEAF or kind is DERIVED:
                known[last] = self._of_leaf(last.variable) if kind is LEAF else None
                waiting.pop()
                continue
            arguments: list[Layout] = []
            missing = []
            for child, own in last.next_functions:
                if child is None:
                    arguments.append(None)
                elif child in known:
                    found = known[child]
                    arguments.append(found[own] if type(found) is list else found)  # type: ignore[arg-type]
                else:
                    missing.append(child)
            if missing:
                waiting += missing
                continue
            waiting.pop()
            known[last] = self._flow(last, kind, arguments)

    def _flow(self, node: Any, kind: Any, arguments: list[Layout]) -> "Layout | list[Layout]":
        if kind is _WATCHED:
            return self._of_watched(node, arguments)
        if arguments.count(None) == len(arguments):
            return None
        if kind.__name__ in _TRUSTED:
            return next(layout for layout in arguments if layout is not None)
        flow = flow_of(kind)
        try:
            if flow is not None:
                try:
                    return flow(self, node, arguments)
                except LookupError:
                    pass
            return probed(self, node, arguments)
        except Mixed as reason:
            raise UnsupportedOperation(_message(node.name(), str(reason))) from None

    def _of_leaf(self, variable: torch.Tensor) -> Layout:
        """A parameter that is not watched has no examples in it; inputs with a gradient have."""
        if isinstance(variable, torch.nn.Parameter):
            return None
        places = [axis for axis in (0, 1) if variable.dim() > axis and variable.shape[axis] == self.examples]
        return Rows(places[0], 1, self.examples, 1) if places else None

    def _of_watched(self, node: Any, arguments: list[Layout]) -> "Layout | list[Layout]":
        operation: Operation = node.operation
        found = [layout for layout in arguments if layout is not None]
        if found and all(isinstance(layout, WholeBatch) for layout in found):
            raise UnsupportedOperation(_numbers_of_all(operation))
        for k, layout in enumerate(arguments):
            if isinstance(layout, Rows):
                self._check_rows(node, operation, k, layout)
        results = [self._place(operation, k, self.result(node, k)) for k in range(len(results_of(node)))]
        if type(operation) is Generic and not keeps_apart(operation, arguments, results):
            raise UnsupportedOperation(_message(operation.name, "lets rows of different examples meet"))
        return results

    def _check_rows(self, node: Any, operation: Operation, k: int, layout: Rows) -> None:
        """Row i of an operation on parameters counts as example i, so it must be that."""
        if isinstance(operation, Elementwise):
            layout_there = same(self, node, [layout if j == k else None for j in range(k + 1)])
            wanted, got = self._place(operation, 0, self.result(node)), layout_there
        else:
            shape = self.shape(node, k)
            wanted, got = self._place(operation, k if isinstance(operation, Recurrent) else 0, shape), layout
        if wanted != got and not (isinstance(operation, Generic) and layout.label is None):
            reason = "reads rows that were moved, so that row i is not example i any more"
            raise UnsupportedOperation(_message(operation.name, reason))

    def _place(self, operation: Operation, which: int, shape: Sequence[int]) -> Layout:
        """Where the examples are in a tensor of a watched operation: 0, or 1 inside attention and recurrent layers."""
        axis = operation.axis
        if isinstance(operation, Recurrent) and not operation.is_cell:
            axis = int(which > 0 or not operation._batch_first)
        if len(shape) <= axis:
            return None
        if self.samples > 1:
            return self._place_of_samples(axis, shape)
        merged_behind = axis == 1 and len(shape) == 2 and not isinstance(operation, Recurrent)  # (T·M, d)
        place = 0 if merged_behind else axis
        others, rest = divmod(shape[place], self.examples)
        if rest or not others:
            return None
        return (
            Rows(place, others, self.examples, 1) if merged_behind else Rows(place, 1, self.examples, others)
        )

    def _place_of_samples(self, axis: int, shape: Sequence[int]) -> Layout:
        """Samples are folded into the examples, (K·M, …), or stand in front of them, (K, M, …)."""
        folded, samples = self.samples * self.examples, self.samples
        others, rest = divmod(shape[axis], folded)
        if others and not rest:
            return Rows(axis, samples, self.examples, others)
        apart = len(shape) > 1 and shape[0] == samples and shape[1] % self.examples == 0
        return Rows(1, 1, self.examples, shape[1] // self.examples) if apart else None


def _numbers_of_all(operation: Operation) -> str:
    keys = {id(root) for source in operation.watched_sources if source is not None for root in source.roots}
    names = operation.watched_by.names()
    return (
        f"{operation.name} with {', '.join(sorted(repr(names[key]) for key in keys))} takes numbers that all examples "
        "have made together, such as the mean losses of several tasks, so which part of the parameter's gradient is "
        "whose cannot be told. A learned weight or log variance of a loss goes to the losses of the examples, before "
        "the mean: (torch.exp(-s) * losses + s).mean(). IVON and BayesByBackprop need no gradients of single examples."
    )


def _message(name: str, reason: str) -> str:
    return (
        f"{name} {reason}, so the gradients of single examples cannot be told apart, and their squares would be "
        "wrong. Let row i of every tensor depend on example i alone: reorder, pair or mix the inputs before the model "
        "instead of its outputs; give the members of a pair or a triplet a pass through the model each, or put them "
        "beside each other in (B, 3, …) with examples=B; use IVON or BayesByBackprop, which need no gradients of "
        "single "
        "examples, for losses that compare examples."
    )
