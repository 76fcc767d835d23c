"""Reads the graph of a loss before the backward pass: every use of every watched parameter, and M.

A parameter may only be reached through operations that the block has watched. Anything else (a
forward outside the block, a compiled or scripted model, a custom autograd function) would give it a
gradient without its square, and raises here, before anything has changed.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from credo.curvature.accumulate import WHOLE, BackwardPass, Share, SquareAccumulator, Watched
from credo.curvature.backward_calls import EngineCall, takes_mean
from credo.curvature.flow_lookup import ELEMENTWISE, SHAPES_ALONE, operation_name
from credo.curvature.layouts import WHOLE_BATCH, Rows, signed
from credo.curvature.loss_factor import of_a_mean, outer_factors, refuse_number_of_examples
from credo.curvature.misused_rows import LOOKED_AT, look_at, look_at_operation, look_at_row_for_all
from credo.curvature.passes import JOINS, check_joined, check_one_example
from credo.curvature.reductions import check_sum, read_mean
from credo.curvature.rule import WIDE, Operation
from credo.curvature.rules import Generic
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.rules.recurrent import Recurrent
from credo.curvature.torch_private import (
    DisableTorchFunction,
    creation_order,
    has_saved,
    node_type,
    results_of,
    saved,
    saved_getter,
)
from credo.curvature.trace import DERIVED, LEAF, Trace
from credo.errors import EmptyBatch, InvalidValue, UnsupportedOperation

_grad_fn = attrgetter("grad_fn")
_WATCHED = node_type(Watched)


def audit(
    call: EngineCall,
    accumulator: SquareAccumulator,
    wanted: Container[int],
    declared: int | None,
    samples: int,
) -> BackwardPass:
    """The pass about to begin; raises on parameters that it would reach by unwatched ways."""
    operations, nodes, edges = _watched_operations(call.roots, accumulator)
    loss = -1 if nodes[0] is None else creation_order(nodes[0])
    once: set[int] = set()
    more: set[int] = set()
    for operation in operations:
        if operation.watched_loss not in (-1, loss):
            _refuse_second_loss(call, accumulator)
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
        alone = declared is None and accumulator.current is None
        if alone and not (accumulator.graphs and _outline(nodes, edges) in accumulator.graphs):
            _check_rows_alone(call, nodes, accumulator, bool(more), samples)
        factors, below = outer_factors(call.roots, call.seeds)
        accumulator.outer = tuple(factors)
        is_mean = accumulator.reduction == "mean" and takes_mean(below)
        accumulator.factors = tuple(factors) if is_mean else ()
        share = math.prod(factor.value for factor in factors) if is_mean else math.nan
        accumulator.add_share(Share(share, share))
    if reaches and accumulator.current is None and accumulator.reduction is not None:
        for operation in operations:
            operation.watched_loss = loss
    return BackwardPass(examples, counted, wanted, single)


def _refuse_second_loss(call: EngineCall, accumulator: SquareAccumulator) -> None:
    """Two losses of one forward pass have the same examples, whose gradients are squared after they are added."""
    if accumulator.current is None and accumulator.reduction is not None and call.wanted is None:
        raise UnsupportedOperation(
            "a second loss goes back through a forward pass that another loss has gone back through already. An "
            "example's gradient is that of both, and a square of the sum is not the sum of the squares. Add the "
            "losses, and call backward once: (loss1 + loss2).backward(). IVON and BayesByBackprop need no gradients "
            "of single examples."
        )


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
        known, new = _structure_of(nodes, edges, examples // samples, samples)

        def trace() -> Trace:
            if new is not None:
                return new
            assert known is not None
            return Trace((), examples // samples, samples, (nodes, known.layouts))

        if accumulator.current is not None or accumulator.reduction is None:
            return examples
        counted = examples
        if not declared and (known is None or not known.joins_are_right):
            for node in nodes:
                if type(node).__name__ in JOINS:
                    check_joined(node, _joins_rows(node, trace()))
            if known is not None:
                known.joins_are_right = True
        if accumulator.reduction == "sum":
            check_sum(trace(), call.roots, call.seeds, declared)
            accumulator.outer = tuple(outer_factors(call.roots, call.seeds)[0])
        elif (
            known is not None
            and len(call.roots) == 1
            and call.seeds[0] is None
            and known.is_mean_of_all(nodes[0], accumulator, examples)
        ):
            accumulator.factors = accumulator.outer = ()
            if accumulator.shares:
                accumulator.add_share(WHOLE)
            else:
                accumulator.shares.append(WHOLE)
        else:
            reading = read_mean(trace(), call.roots, call.seeds, declared)
            counted = reading.examples
            factors, _ = outer_factors(call.roots, call.seeds)
            accumulator.outer = tuple(factors)
            accumulator.factors = of_a_mean(factors, reading.share.of_examples) if factors else ()
            for number in {examples // samples, counted // samples} if accumulator.factors else ():
                refuse_number_of_examples(accumulator.factors, number, accumulator.constants)
            accumulator.add_share(reading.share)
        if not declared:
            accumulator.graphs.add(_outline(nodes, edges) if known is None else known.outline)
        return counted


def _joins_rows(node: Any, trace: Trace) -> bool:
    """Whether rows of examples are put behind each other, or written between each other."""
    if type(node).__name__ != "CatBackward0":
        found = trace.layout(node)
        return isinstance(found, Rows) and found.outer * found.inner > 1
    axis, dims = signed(saved(node, "dim")), len(trace.result(node))
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
                look_at_row_for_all(node, accumulator)
            if accumulator.reduction is not None and name in JOINS:
                check_joined(node, _puts_rows_behind(node, samples))


def _puts_rows_behind(node: Any, samples: int) -> bool:
    """As `_joins_rows`, where every tensor is of one example. Samples may stand in front of the rows."""
    if type(node).__name__ == "CatBackward0":
        return signed(saved(node, "dim")) in (0, int(samples > 1))
    shape = results_of(node)[0].shape
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
            known = kind is DERIVED
            if kind.__name__ in LOOKED_AT:
                look_at(node, accumulator)
        for child, own in node.next_functions:
            kind = type(child)
            if not known and (kind is LEAF or kind is DERIVED):
                _check_edge(node, child, accumulator)
            if kind is LEAF:
                leaf = child.variable
                ours = type(leaf) is Parameter or isinstance(
                    leaf, Parameter
                )  # the second for subclasses of tensors
                edges.append(-2 if ours else FOREIGN)
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
    reached = [child.variable] if type(child) is LEAF else child.source.roots
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
    if lead < 0 and isinstance(operation, Elementwise):
        return (
            f"{operation.name} with {names} makes one number for the {examples} examples of the batch, so which part "
            "of its gradient is whose cannot be told. A learned weight of a loss, a temperature or a log variance "
            "goes to the losses of the examples, before the mean: (torch.exp(-s) * losses + s).mean(). A penalty on "
            "parameters has no examples: a prior does its work (prior_precision)."
        )
    got = "no leading dimension" if lead < 0 else f"a leading dimension of {lead}"
    return (
        f"{operation.name} with {names} has {got} where the batch has {examples} examples. The leading "
        "dimension must count examples: use batch_first, keep (B, T, d) instead of (T, B, d), or, where the rows "
        "of one example follow each other as in (B·T, d), say how many examples there are with examples=B. A "
        "constant that meets a parameter (position numbers, a mask) must be a buffer of the module. Learned weights of "
        "several losses meet the losses of the examples, before the mean. A "
        "penalty on parameters in the loss has no examples: a prior does its work."
    )


# ────────────────────────────────────────
# Remembers how the examples went through graphs that were followed before.
#
# Training builds the same graph at every step, and following the examples through it takes longer than looking at it.
# What is remembered belongs to a key with everything that the layouts depend on: operations, edges, shapes and
# dimensions. Graphs in which the values of an index decide, or numbers had to be asked, are followed anew each time.

_of_nll_loss = saved_getter("weight", "total_weight", "target")
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
        ("dim",),
    ),
    **dict.fromkeys(["Flip", "Roll", "Permute"], ("dims",)),
    "Transpose": ("dim0", "dim1"),
    "Slice": ("dim", "start", "end", "step"),
    "Select": ("dim", "index"),
    "Repeat": ("repeats",),
    "NativeLayerNorm": ("normalized_shape",),
    "NativeGroupNorm": ("group",),
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
        ("reduction",),
    ),
    **dict.fromkeys(("SumBackward1", "MeanBackward1", "VarBackward0"), ("dim", "keepdim")),
    **dict.fromkeys(("SumBackward0", "MeanBackward0", "SqueezeBackward0", "TBackward0"), ()),
    **dict.fromkeys(("SqueezeBackward1", "SqueezeBackward2"), ("dim",)),
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

    def __init__(self, trace: Trace, nodes: Sequence[Any], outline: int):
        self.layouts = [trace.result_layouts(node) for node in nodes]
        self._plain, name = False, operation_name(type(nodes[0]))
        if nodes.count(None) == 0 and trace.result_layouts(nodes[0]) is WHOLE_BATCH:
            rows = trace.arguments(nodes[0])[0]
            whole = isinstance(rows, Rows) and rows.label is None
            self._plain = whole and (name == "Mean" or saved(nodes[0], "reduction", 0) == 1)
        self._chooses = name.startswith("NllLoss")
        self.outline = outline
        self.joins_are_right = False  # whether what is put behind each other was looked at

    def is_mean_of_all(self, root: Any, accumulator: SquareAccumulator, examples: int) -> bool:
        """Whether the root is a mean over all rows; False where that has to be read."""
        if not self._chooses:
            return self._plain
        weight, total, target = _of_nll_loss(root)
        count = target.numel()
        if not self._plain or weight is not None:
            return False
        exact = total.dtype in WIDE and target.dim() == 1 and count == examples
        if not total.is_cpu and exact and accumulator.assumes and not accumulator.shares:
            accumulator.assumed = ((total, count),)
            return True
        return bool(total == count)  # none is ignored


def _structure_of(
    nodes: Sequence[Any], edges: Sequence[int], examples: int, samples: int
) -> tuple[Structure | None, Trace | None]:
    """What is remembered of the graph, if it can be; and the layouts of all results, if they had to be followed."""
    key = _key(nodes, edges, examples, samples)
    if key is None:
        return None, Trace(nodes, examples, samples)
    known = _known.get(key)
    if known is not None:
        return known, None
    trace = Trace(nodes, examples, samples)
    if len(_known) >= _MOST:
        _known.pop(next(iter(_known)))
    _known[key] = known = Structure(trace, nodes, _outline(nodes, edges))
    return known, trace


def _outline(nodes: Sequence[Any], edges: Sequence[int]) -> int:
    """A graph without its sizes: a batch of one has that of the batches before it."""
    kinds = (type(node.operation) if type(node) is _WATCHED else type(node) for node in nodes)
    return hash((*kinds, *edges))


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
        elif kind is DERIVED or kind is LEAF or node is None:
            parts.append(kind)
            continue
        else:
            known, read, unary = _attributes(kind)
            if not known:
                return None
            parts.append(kind)
            if read is not None:
                parts.append(read(node))
            if unary:  # its shape is that of its argument
                continue
        parts.extend([tuple(meta.shape) for meta in results_of(node)])
    return tuple(parts)


def _attributes(kind: Any) -> tuple[bool, Callable[[Any], Any] | None, bool]:
    """Of a type of nodes: whether it is known, what reads its attributes, whether it keeps the argument's shape."""
    found = _found.get(kind)
    if found is None:
        name = operation_name(kind)
        names = _ATTRIBUTES.get(kind.__name__, _ATTRIBUTES.get(name))
        known = names is not None and all(has_saved(kind, own) for own in names)
        found = _found[kind] = (known, saved_getter(*names) if known and names else None, name in _UNARY)
    return found


_found: dict[Any, tuple[bool, Callable[[Any], Any] | None, bool]] = {}
