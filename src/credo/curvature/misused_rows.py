"""Rows that are not examples: raises, before a backward pass, where rows that count as examples are used otherwise.

Row i of a watched operation's result counts as example i. That is not so where a parameter met a tensor without
examples that was not declared constant, as in `F.linear(x, self.weight @ self.turn)` with a plain tensor `turn`.
There rows of the weight would be counted, and their squares be wrong without a sign. The graph shows it:

    weight       a result with rows becomes the weight of an operation, which all examples share
    broadcast    a result with rows is repeated along a new leading dimension, which has the examples
    parameter    the leading dimension of a product is the parameter's own

A loss that compares examples with one another (x @ x.T) looks the same, and has no gradients of single examples.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from credo.curvature.accumulate import SquareAccumulator, Watched
from credo.curvature.rule import Operation
from credo.curvature.rules import Generic
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.torch_private import node_type, results_of, saved
from credo.curvature.tracking import ParameterSource
from credo.errors import UnsupportedOperation

_WATCHED = node_type(Watched)

# Autograd's operations → which of their arguments all rows of the result share.
_WEIGHTS = {
    "MmBackward0": (1,),
    "MvBackward0": (1,),
    "BmmBackward0": (1,),  # of one matrix, as einsum writes a product
    "AddmmBackward0": (2,),
    "AddmvBackward0": (2,),
    "BaddbmmBackward0": (2,),
    "CdistBackward0": (1,),
    "EuclideanDistBackward0": (1,),
    "LinearBackward0": (1, 2),
    "ConvolutionBackward0": (1, 2),
    "NativeLayerNormBackward0": (1, 2),
    "NativeGroupNormBackward0": (1, 2),
    "NativeBatchNormBackward0": (1, 2),
    "FusedRmsNormBackward0": (1,),
    "PreluKernelBackward0": (1,),
    "EmbeddingBackward0": (0,),
}
_IN_BATCHES = ("BmmBackward0", "BaddbmmBackward0", "CdistBackward0", "EuclideanDistBackward0")
# … → which of their arguments may be repeated to the shape of the result.
_REPEATS = dict.fromkeys(("AddmmBackward0", "BaddbmmBackward0", "ExpandBackward0", "RepeatBackward0"), (0,))
_ARITHMETIC = {
    **dict.fromkeys(
        ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "WhereBackward0"), (0, 1)
    ),
    **dict.fromkeys(("MaximumBackward0", "MinimumBackward0", "PowBackward1"), (0, 1)),
    **dict.fromkeys(("AddcmulBackward0", "AddcdivBackward0", "LerpBackward1"), (0, 1, 2)),
}
_BROADCASTS = _REPEATS | _ARITHMETIC
LOOKED_AT = frozenset((*_WEIGHTS, *_BROADCASTS))

_PICKS = ("SelectBackward0", "UnbindBackward0", "SliceBackward0", "SplitBackward0")
# Statistics of a batch, as in a normalisation by hand, are repeated on purpose.
_STATISTICS = (
    "SumBackward1",
    "MeanBackward1",
    "VarBackward0",
    "StdBackward0",
    "VarMeanBackward0",
    "AmaxBackward0",
)
_PRODUCTS = ("matmul", "__matmul__", "mm", "mv", "addmm", "bmm", "baddbmm", "einsum")
# The result has the rows of the first argument, whatever the others are.
_ROWS_OF_THE_FIRST = (
    *("inner", "tensordot", "chain_matmul", "linalg_multi_dot", "cdist"),
    *("linalg_solve", "linalg_solve_triangular"),
)


def look_at(node: Any, accumulator: SquareAccumulator) -> None:
    """Raises on a node, of one of the types in `LOOKED_AT`, that uses rows as no examples can be used."""
    name = type(node).__name__
    batched = name in _IN_BATCHES and len(_shape(node)) > 2 and _shape(node)[0] > 1
    if name in _WEIGHTS and not batched:
        _look_at_weights(node, _WEIGHTS[name], accumulator)
    if name in _BROADCASTS:
        _look_at_broadcasts(node, _BROADCASTS[name], accumulator)


def look_at_operation(node: Any, operation: Operation) -> None:
    """Raises on a watched node whose rows are a parameter's, or in which such rows stand where a parameter should."""
    if isinstance(operation, Generic):
        known = operation.name in _PRODUCTS or operation.name in _ROWS_OF_THE_FIRST
        if known and _counts_a_parameter(node, operation, in_any_shape=False):
            _refuse(
                operation,
                f"{operation.name} has rows of the parameter in front, where the examples should be",
            )
    elif not isinstance(operation, Elementwise):
        unknown = [k for k in operation.parameter_slots if operation.watched_sources[k] is None]
        _look_at_weights(node, unknown, operation.watched_by)


def _look_at_weights(node: Any, slots: Iterable[int], accumulator: SquareAccumulator) -> None:
    for child, own in _children(node, slots):
        for maker, picked in _makers(child, own, accumulator, _PICKS):
            operation = maker.operation
            if _counts_a_parameter(maker, operation) or not (
                picked or _rows(operation) == 1 or _in_groups(node, _rows(operation))
            ):
                _refuse(operation, f"{_name(node)} takes it for a weight that all examples share")


def _look_at_broadcasts(node: Any, slots: Iterable[int], accumulator: SquareAccumulator) -> None:
    """Draws of noise may stand in front of the examples, (K, M, …), where arithmetic meets them: unless K = M."""
    shape, strict = _shape(node), type(node).__name__ in _REPEATS
    for child, own in _children(node, slots):
        given = _shape(child, own)
        if not given or (len(given) == len(shape) and given[0] == shape[0]):
            continue
        for maker, picked in _makers(child, own, accumulator, (*_PICKS, *_STATISTICS)):
            operation = maker.operation
            suspicious = not picked and _rows(operation) > 1 and (strict or _rows(operation) == shape[0])
            if suspicious or _counts_a_parameter(maker, operation):
                _refuse(
                    operation, f"{_name(node)} repeats it for every row of a tensor of shape {tuple(shape)}"
                )


def look_at_row_for_all(node: Any, accumulator: SquareAccumulator) -> None:
    """What one row became must not be a weight, or be repeated, for the rows of a batch: they are the examples then."""
    name, shape = type(node).__name__, _shape(node)
    batched = name in _IN_BATCHES and len(shape) > 2
    if batched and (shape[0] > 1 or any(child is not None for child, _ in node.next_functions[:-1])):
        return  # attention and the like, among what is known of one example
    if len(shape) < 1 or (shape[1] if batched else shape[0]) < 2:
        return
    rows = shape[1] if batched else shape[0]
    for child, own in _children(node, _WEIGHTS.get(name, ())):
        for maker, _ in _makers(child, own, accumulator, ()):
            _refuse(maker.operation, f"{_name(node)} takes it for a weight of {rows} rows")
    for child, own in _children(node, _BROADCASTS.get(name, ())):
        given = _shape(child, own)
        for maker, picked in _makers(child, own, accumulator, (*_PICKS, *_STATISTICS)):
            alone = len(given) == len(_shape(maker)) and (
                len(given) == 1 < len(shape) or (len(given) == len(shape) > 1 and given[0] == 1)
            )
            if alone and not picked:
                _refuse(maker.operation, f"{_name(node)} repeats it for {shape[0]} rows")


def _children(node: Any, slots: Iterable[int]) -> Iterator[tuple[Any, int]]:
    """The nodes that made these arguments, and which of their results it was."""
    edges = node.next_functions
    return ((child, own) for child, own in (edges[k] for k in slots if k < len(edges)) if child is not None)


def _makers(
    node: Any, own: int, accumulator: SquareAccumulator, stops: Sequence[str]
) -> Iterator[tuple[Any, bool]]:
    """The watched nodes nearest under this one, and whether one row (or a statistic) was taken on the way."""
    todo, seen = [(node, own, False)], set()
    while todo:
        node, own, picked = todo.pop()
        if type(node) is _WATCHED and node.operation.watched_by is accumulator:
            yield node, picked
            continue
        picked = picked or (type(node).__name__ in stops and _leaves_one_row(node, own))
        for child, number in node.next_functions:
            if child is not None and (child, picked) not in seen:
                seen.add((child, picked))
                todo.append((child, number, picked))


def _leaves_one_row(node: Any, own: int) -> bool:
    name = type(node).__name__
    if name in _STATISTICS:
        return True
    if name in ("SliceBackward0", "SplitBackward0"):
        return bool(saved(node, "dim") == 0 and _shape(node, own)[0] == 1)
    return bool(saved(node, "dim", 0) == 0)


def _counts_a_parameter(node: Any, operation: Operation, in_any_shape: bool = True) -> bool:
    """Whether the leading dimension of a watched result is that of a parameter, or of what was computed from it.

    What a parameter was expanded to may have a row for each example; `in_any_shape` counts it all the same.
    """
    if not isinstance(operation, (Elementwise, Generic)) or operation.lead <= 1:
        return False
    if isinstance(operation, Generic) and operation.equation:
        return _sums_into_a_parameter(operation.equation, operation)
    dims = len(_shape(node))
    return any(
        source.tensor.dim() >= dims
        and source.tensor.shape[0] == operation.lead
        and (in_any_shape or source.selects or dims <= 2)
        for source in _in_front(operation)
    )


def _in_front(operation: Operation) -> list[ParameterSource]:
    """The parameters whose rows the result may have in front."""
    name, sources, last = operation.name, operation.watched_sources, operation.watched_sources[-1]
    if name in _ROWS_OF_THE_FIRST:
        sources = sources[:1]
    elif name in _PRODUCTS and last is not None and last.tensor.dim() <= 2:
        sources = sources[:-1]  # x @ W sums over the rows of W
    return [source for source in sources if source is not None]


def _sums_into_a_parameter(equation: str, operation: Operation) -> bool:
    """Whether the first letter of an einsum's result is a parameter's alone, or one that its own rows have."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    first = (result if arrow else "".join(sorted(c for c in inputs if inputs.count(c) == 1 and c != ",")))[:1]
    terms = list(zip(inputs.split(","), operation.watched_sources, strict=True))
    in_data = any(first in term for term, source in terms if source is None)
    return first.isalpha() and (
        not in_data or any(first in term for term, s in terms if s is not None and s.selects)
    )


def _in_groups(node: Any, rows: int) -> bool:
    """Whether each example has a weight of its own, its channels being a group: (1, M·C, …) from (M, C, …)."""
    name = type(node).__name__
    if name not in ("ConvolutionBackward0", "NativeBatchNormBackward0"):
        return False
    x, (maker, _) = saved(node, "input"), node.next_functions[0]
    before = saved(maker, "self_sym_sizes", None) or (x._base.shape if x._base is not None else (0,))
    own_groups = name.startswith("Native") or saved(node, "groups") % rows == 0
    return bool(x.shape[0] == 1 and before[0] == rows and own_groups)


def _rows(operation: Operation) -> int:
    return operation.merged_from or operation.lead


def _shape(node: Any, own: int = 0) -> Sequence[int]:
    shape: Sequence[int] = results_of(node)[own].shape
    return shape


def _name(node: Any) -> str:
    return str(node.operation.name if type(node) is _WATCHED else node.name())


def _refuse(operation: Operation, what: str) -> None:
    names = operation.watched_by.names()
    roots = {id(root) for source in operation.watched_sources if source is not None for root in source.roots}
    raise UnsupportedOperation(
        f"parameter {', '.join(sorted(repr(names[key]) for key in roots))}: the rows of {operation.name} count as "
        f"examples, but {what}, so the squares would be wrong. A constant that meets a parameter must be known: "
        "register it with self.register_buffer and pass the module, or make it from the parameter (torch.randn_like). "
        "Give data-dependent weights a leading dimension of examples (torch.bmm), and let examples be rows: x @ A, "
        "not A @ x.T. A loss that compares examples with one another has no squared gradients."
    )
