"""Remembers how the examples went through graphs that were followed before.

Training builds the same graph at every step, and following the examples through it takes longer than looking at it.
What is remembered belongs to a key with everything that the layouts depend on: operations, edges, shapes and
dimensions. Graphs in which the values of an index decide, or numbers had to be asked, are followed anew each time.
"""

from collections.abc import Sequence
from typing import Any

from credo.curvature.flow_table import ELEMENTWISE, SHAPES_ALONE, operation_name
from credo.curvature.layouts import BATCH, Rows
from credo.curvature.provenance import Derived
from credo.curvature.rules import Generic
from credo.curvature.rules.recurrent import Recurrent
from credo.curvature.tracing import LEAF, Trace
from credo.curvature.watched import Watched

_WATCHED: Any = Watched._backward_cls
_DERIVED: Any = Derived._backward_cls
FOREIGN = -3  # in place of a node: a leaf that is no parameter
_MOST = 64  # graphs
_known: dict[Any, "Structure"] = {}

# The attributes on which the layout of a result depends, beside shapes.
_ATTRIBUTES = {
    **dict.fromkeys(
        [
            "Softmax",
            "LogSoftmax",
            "SafeSoftmax",
            "Cumsum",
            "Cumprod",
            "Logcumsumexp",
            "Glu",
            "Unsqueeze",
            "Cat",
            "Stack",
            "Unbind",
        ],
        ("_saved_dim",),
    ),
    **dict.fromkeys(["Flip", "Roll", "Permute"], ("_saved_dims",)),
    "Transpose": ("_saved_dim0", "_saved_dim1"),
    "Slice": ("_saved_dim", "_saved_start", "_saved_end", "_saved_step"),
    "Select": ("_saved_dim", "_saved_index"),
    "Repeat": ("_saved_repeats",),
    "NativeLayerNorm": ("_saved_normalized_shape",),
    **dict.fromkeys(
        [
            "NllLoss",
            "NllLoss2D",
            "MseLoss",
            "SmoothL1Loss",
            "HuberLoss",
            "BinaryCrossEntropy",
            "BinaryCrossEntropyWithLogits",
        ],
        ("_saved_reduction",),
    ),
    **dict.fromkeys(("SumBackward1", "MeanBackward1", "VarBackward0"), ("_saved_dim", "_saved_keepdim")),
    **dict.fromkeys(("SumBackward0", "MeanBackward0", "SqueezeBackward0", "TBackward0"), ()),
    **dict.fromkeys(("SqueezeBackward1", "SqueezeBackward2"), ("_saved_dim",)),
    **dict.fromkeys((*ELEMENTWISE, *SHAPES_ALONE), ()),
}
_UNARY = frozenset(
    [
        "Relu",
        "Sigmoid",
        "Tanh",
        "Gelu",
        "Silu",
        "Softmax",
        "LogSoftmax",
        "Exp",
        "Log",
        "Neg",
        "Dropout",
        "ToCopy",
        "Clone",
    ]
)


class Structure:
    """What is remembered of a graph: layouts, by the places of the nodes, and whether its loss is plainly a mean."""

    def __init__(self, trace: Trace, nodes: Sequence[Any]):
        self.layouts = [trace.result_layouts(node) for node in nodes]
        self._plain, name = False, operation_name(type(nodes[0]))
        if nodes.count(None) == 0 and trace.result_layouts(nodes[0]) is BATCH:
            rows = trace.arguments(nodes[0])[0]
            whole = isinstance(rows, Rows) and rows.label is None
            self._plain = whole and (name == "Mean" or getattr(nodes[0], "_saved_reduction", 0) == 1)
        self._chooses = name.startswith("NllLoss")

    def is_mean_of_all(self, root: Any) -> bool:
        """Whether the root is a mean over all rows; False where that has to be read."""
        if not self._chooses:
            return self._plain
        if not self._plain or root._saved_weight is not None:
            return False
        return bool(root._saved_total_weight == root._saved_target.numel())  # none is ignored


def trace_of(
    nodes: Sequence[Any], edges: Sequence[int], examples: int, samples: int
) -> tuple[Trace, Structure | None]:
    """The layouts of all results: remembered, or followed."""
    key = _key(nodes, edges, examples, samples)
    if key is None:
        return Trace(nodes, examples, samples), None
    known = _known.get(key)
    if known is not None:
        return Trace((), examples, samples, (nodes, known.layouts)), known
    trace = Trace(nodes, examples, samples)
    if len(_known) >= _MOST:
        _known.pop(next(iter(_known)))
    _known[key] = known = Structure(trace, nodes)
    return trace, known


def _key(nodes: Sequence[Any], edges: Sequence[int], examples: int, samples: int) -> Any:
    """None if there is none."""
    if FOREIGN in edges:
        return None
    parts: list[Any] = [examples, samples, tuple(edges)]
    for node in nodes:
        kind = type(node)
        if kind is _WATCHED:
            operation = node.operation
            rule = type(operation)
            if rule is Generic:
                return None
            parts.append((rule, operation.lead, operation.axis))
            if rule is Recurrent:
                parts.append((operation.is_cell, operation._batch_first))
        elif kind is _DERIVED or kind is LEAF or node is None:
            parts.append(kind)
            continue
        else:
            names, unary = _attributes(kind)
            if names is None:
                return None
            parts.append(kind)
            if names:
                parts.extend([getattr(node, name) for name in names])
            if unary:  # its shape is that of its argument
                continue
        parts.extend([tuple(meta.shape) for meta in node._input_metadata])
    return tuple(parts)


def _attributes(kind: Any) -> tuple[tuple[str, ...] | None, bool]:
    """Of a type of nodes: the names of the attributes, and whether results have the shape of the argument."""
    found = _found.get(kind)
    if found is None:
        name = operation_name(kind)
        found = _found[kind] = (_ATTRIBUTES.get(kind.__name__, _ATTRIBUTES.get(name)), name in _UNARY)
    return found


_found: dict[Any, tuple[tuple[str, ...] | None, bool]] = {}
