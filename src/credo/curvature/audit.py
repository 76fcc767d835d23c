"""Reads the graph of a loss before the backward pass: every use of every watched parameter, and M.

A parameter may only be reached through operations that the block has watched. Anything else (a
forward outside the block, a compiled or scripted model, a custom autograd function) would give it a
gradient without its square, and raises here, before anything has changed.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from credo.curvature.accumulate import WHOLE, BackwardPass, Share, SquareAccumulator, Watched
from credo.curvature.backward_calls import EngineCall, takes_mean
from credo.curvature.layouts import Rows, signed
from credo.curvature.loss_factor import of_a_mean, outer_factors, refuse_number_of_examples
from credo.curvature.passes import JOINS, check_joined, check_one_example
from credo.curvature.reductions import check_sum, read_mean
from credo.curvature.rule import Operation
from credo.curvature.rules import Generic
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.torch_private import DisableTorchFunction, node_type, results_of, saved
from credo.curvature.trace import FOREIGN, Trace, trace_of
from credo.curvature.trace import LEAF as _LEAF
from credo.curvature.tracking import Derived, ParameterSource
from credo.errors import EmptyBatch, InvalidValue, UnsupportedOperation

_grad_fn = attrgetter("grad_fn")
_WATCHED = node_type(Watched)
_DERIVED = node_type(Derived)


def audit(
    call: EngineCall,
    accumulator: SquareAccumulator,
    wanted: Container[int],
    declared: int | None,
    samples: int,
) -> BackwardPass:
    """The pass about to begin; raises on parameters that it would reach by unwatched ways."""
    operations, nodes, edges = _watched_operations(call.roots, accumulator)
    once: set[int] = set()
    more: set[int] = set()
    for operation in operations:
        keys, direct = [], True
        for source in operation.watched_sources:
            if source is None:
                continue
            keys.append(key := source.key)
            direct = direct and source.is_parameter
            if source.selects and key not in once:
                once.add(key)
            else:  # what was computed from a parameter must wait for the end of the pass, as a second use must
                more.update(map(id, source.roots))
        operation.watched_keys = tuple(keys) if direct else ()
    once -= more
    single = once if wanted is accumulator.parameters else {key for key in once if key in wanted}
    examples = _count_examples(operations, accumulator, declared)
    reaches = wanted is accumulator.parameters or any(key in wanted for key in accumulator.parameters)
    counted = examples
    if reaches and examples > samples:  # one example cannot meet another
        counted = _count_in_the_loss(call, nodes, edges, accumulator, examples, samples, declared is not None)
    elif reaches and examples:
        if declared is None and accumulator.current is None:
            _check_rows_alone(call, nodes, accumulator, bool(more), samples)
        factors, below = outer_factors(call.roots, call.seeds)
        accumulator.outer = tuple(factors)
        is_mean = accumulator.reduction == "mean" and takes_mean(below)
        accumulator.factors = tuple(factors) if is_mean else ()
        share = math.prod(factor.value for factor in factors) if is_mean else math.nan
        accumulator.add_share(Share(share, share))
    return BackwardPass(examples, counted, wanted, single)


def _count_in_the_loss(
    call: EngineCall,
    nodes: Sequence[Any],
    edges: Sequence[int],
    accumulator: SquareAccumulator,
    examples: int,
    samples: int,
    declared: bool,
) -> int:
    """Over how many examples the loss is a mean; raises on losses in which examples meet."""
    with DisableTorchFunction():  # what is asked of small tensors here is no part of the forward pass
        trace, known = trace_of(nodes, edges, examples // samples, samples)
        if accumulator.current is not None or accumulator.reduction is None:
            return examples
        if not declared and (known is None or not known.joins_are_right):
            for node in nodes:
                if type(node).__name__ in JOINS:
                    check_joined(node, _joins_rows(node, trace))
            if known is not None:
                known.joins_are_right = True
        if accumulator.reduction == "sum":
            check_sum(trace, call.roots, call.seeds, declared)
            accumulator.outer = tuple(outer_factors(call.roots, call.seeds)[0])
            return examples
        if (
            known is not None
            and len(call.roots) == 1
            and call.seeds[0] is None
            and known.is_mean_of_all(nodes[0])
        ):
            accumulator.add_share(WHOLE)
            accumulator.factors = accumulator.outer = ()
            return examples
        reading = read_mean(trace, call.roots, call.seeds, declared)
        factors, _ = outer_factors(call.roots, call.seeds)
        accumulator.outer = tuple(factors)
        accumulator.factors = of_a_mean(factors, reading.share.of_examples) if factors else ()
        for number in {examples // samples, reading.examples // samples} if accumulator.factors else ():
            refuse_number_of_examples(accumulator.factors, number, accumulator.constants)
        accumulator.add_share(reading.share)
        return reading.examples


def _joins_rows(node: Any, trace: Trace) -> bool:
    """Whether rows of examples are put behind each other, or written between each other."""
    if type(node).__name__ != "CatBackward0":
        found = trace.layout(node)
        return isinstance(found, Rows) and found.outer * found.inner > 1
    axis, dims = signed(saved(node, "dim")), len(_shape(node))
    return any(isinstance(rows, Rows) and rows.axis == axis % dims for rows in trace.arguments(node))


def _check_rows_alone(
    call: EngineCall,
    nodes: Sequence[Any],
    accumulator: SquareAccumulator,
    several_uses: bool,
    samples: int,
) -> None:
    """A single row is one example, unless there is one for each of them, or one for all of them."""
    several_uses = several_uses and accumulator.reduction is not None
    with DisableTorchFunction():
        if several_uses:
            check_one_example(call.roots, samples)
        for node in nodes:
            name = type(node).__name__
            if samples == 1 and name in LOOKED_AT:
                _look_at_row_for_all(node, accumulator)
            if accumulator.reduction is not None and name in JOINS:
                check_joined(node, _puts_rows_behind(node, samples))


def _puts_rows_behind(node: Any, samples: int) -> bool:
    """As `_joins_rows`, where every tensor is of one example. Samples may stand in front of the rows."""
    if type(node).__name__ == "CatBackward0":
        return signed(saved(node, "dim")) in (0, int(samples > 1))
    shape = _shape(node)
    return samples == 1 and len(shape) > 0 and shape[0] > 1


def _watched_operations(
    roots: Iterable[Tensor], accumulator: SquareAccumulator
) -> tuple[list[Operation], list[Any], list[int]]:
    """All watched operations under the roots, all nodes, and their edges; raises on other edges into parameters."""
    operations: list[Operation] = []
    nodes: list[Any] = list(map(_grad_fn, roots))
    seen: dict[Any, int] = {None: -1} | {node: k for k, node in enumerate(nodes)}
    edges: list[int] = []  # by the places of the nodes in the list
    for node in nodes:  # which grows meanwhile
        kind: Any = type(node)
        if kind is _WATCHED:
            known, operation = True, node.operation
            if operation.watched_by is accumulator:
                operations.append(operation)
                # With one argument that is no parameter, and a rule, that one has the examples.
                if operation.watched_sources.count(None) > 1 or type(operation) is Generic:
                    look_at_operation(node, operation)
        elif node is None:
            continue
        else:
            known = kind is _DERIVED
            if kind.__name__ in LOOKED_AT:
                look_at(node, accumulator)
        for child, own in node.next_functions:
            kind = type(child)
            if not known and (kind is _LEAF or kind is _DERIVED):
                _check_edge(node, child, accumulator)
            if kind is _LEAF:
                edges.append(-2 if type(child.variable) is Parameter else FOREIGN)
                continue
            place = seen.get(child)
            if place is None:
                place = seen[child] = len(nodes)
                nodes.append(child)
            edges.append(place)
            if own:
                edges.append(-3 - own)  # own > 0
        edges.append(-2)
    return operations, nodes, edges


def _check_edge(node: Any, child: Any, accumulator: SquareAccumulator) -> None:
    reached = [child.variable] if type(child) is _LEAF else child.source.roots
    watched = [id(root) for root in reached if id(root) in accumulator.parameters]
    if not watched:
        return
    names = ", ".join(repr(accumulator.names()[key]) for key in watched)
    raise UnsupportedOperation(
        f"parameter {names} reaches the loss through {node.name()}, which was not watched, so its squared "
        "gradients cannot be known. Run the forward inside the block; call the plain module instead of a "
        "compiled or scripted one; write custom autograd functions with torch operations; leave penalties on "
        "parameters out of the loss (a prior does their work); or leave the parameter out of those watched."
    )


def _count_examples(operations: list[Operation], accumulator: SquareAccumulator, declared: int | None) -> int:
    """M: as declared, or the leading dimension of the first watched operation; all others must fit."""
    if not operations:
        return 0
    first = operations[-1]  # most likely
    for operation in operations:
        if operation.watched_order < first.watched_order:
            first = operation
    examples = (
        declared if declared is not None else first.merged_from or abs(first.lead)
    )  # -1: an image by itself
    if examples == 0:
        raise EmptyBatch("the batch is empty: it has no examples, so no gradient. Skip it.")
    for operation in operations:
        fits = operation.lead == examples or operation.merged_from == examples
        if not fits and not (declared and operation.lead > 0 and operation.lead % declared == 0):
            raise InvalidValue(_misfit(operation, accumulator, examples))
    return examples


def _misfit(operation: Operation, accumulator: SquareAccumulator, examples: int) -> str:
    roots = [root for source in operation.watched_sources if source is not None for root in source.roots]
    names = ", ".join(repr(accumulator.names()[id(root)]) for root in roots)
    lead = operation.lead
    got = "no leading dimension" if lead < 0 else f"a leading dimension of {lead}"
    return (
        f"{operation.name} with {names} has {got} where the batch has {examples} examples. The leading "
        "dimension must count examples: use batch_first, keep (B, T, d) instead of (T, B, d), or, where the rows "
        "of one example follow each other as in (B·T, d), say how many examples there are with examples=B. A "
        "constant that meets a parameter (position numbers, a mask) must be a buffer of the module. A "
        "penalty on parameters in the loss has no examples: a prior does its work."
    )


# ────────────────────────────────────────
# Rows that are not examples: raises, before a backward pass, where rows that count as examples are used as something
# else.
#
# Row i of a watched operation's result counts as example i. That is not so where a parameter met a tensor without
# examples that was not declared constant, as in `F.linear(x, self.weight @ self.turn)` with a plain tensor `turn`.
# There rows of the weight would be counted, and their squares be wrong without a sign. The graph shows it:
#
#     weight       a result with rows becomes the weight of an operation, which all examples share
#     broadcast    a result with rows is repeated along a new leading dimension, which has the examples
#     parameter    the leading dimension of a product is the parameter's own
#
# A loss that compares examples with one another (x @ x.T) looks the same, and has no gradients of single examples.


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


def _look_at_row_for_all(node: Any, accumulator: SquareAccumulator) -> None:
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
