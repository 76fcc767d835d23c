"""Reads the graph of a loss before the backward pass: every use of every watched parameter, and M.

A parameter may only be reached through operations that the block has watched. Anything else (a
forward outside the block, a compiled or scripted model, a custom autograd function) would give it a
gradient without its square, and is refused here, before anything has changed.
"""

import math
from collections.abc import Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import Parameter

from credo.curvature.engine import EngineCall
from credo.curvature.ledger import WHOLE, BackwardPass, Ledger, Share
from credo.curvature.mixing import LOOKED_AT, look_at, look_at_operation
from credo.curvature.operation import Operation
from credo.curvature.provenance import Derived
from credo.curvature.reductions import check_sum, read_mean
from credo.curvature.rules import Generic
from credo.curvature.structures import FOREIGN, trace_of
from credo.curvature.tracing import LEAF as _LEAF
from credo.curvature.watched import Watched
from credo.errors import EmptyBatch, InvalidValue, UnsupportedOperation

_grad_fn = attrgetter("grad_fn")
_WATCHED: Any = Watched._backward_cls
_DERIVED: Any = Derived._backward_cls


def audit(
    call: EngineCall, ledger: Ledger, wanted: Container[int], declared: int | None, samples: int
) -> BackwardPass:
    """The pass about to begin; refuses parameters that it would reach by unwatched ways."""
    operations, nodes, edges = _watched_operations(call.roots, ledger)
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
    single = once if wanted is ledger.parameters else {key for key in once if key in wanted}
    examples = _count_examples(operations, ledger, declared)
    reaches = wanted is ledger.parameters or any(key in wanted for key in ledger.parameters)
    counted = examples
    if reaches and examples > samples:  # one example cannot meet another
        counted = _count_in_the_loss(call, nodes, edges, ledger, examples, samples)
    elif reaches and examples:
        ledger.add_share(Share(math.nan, math.nan))
    return BackwardPass(examples, counted, wanted, single)


def _count_in_the_loss(
    call: EngineCall,
    nodes: Sequence[Any],
    edges: Sequence[int],
    ledger: Ledger,
    examples: int,
    samples: int,
) -> int:
    """Over how many examples the loss is a mean; refuses losses in which examples meet."""
    with DisableTorchFunction():  # what is asked of small tensors here is no part of the forward pass
        trace, known = trace_of(nodes, edges, examples // samples, samples)
        if ledger.current is not None or ledger.reduction is None:
            return examples
        if ledger.reduction == "sum":
            check_sum(trace, call.roots, call.seeds)
            return examples
        if (
            known is not None
            and len(call.roots) == 1
            and call.seeds[0] is None
            and known.is_mean_of_all(nodes[0])
        ):
            ledger.add_share(WHOLE)
            return examples
        reading = read_mean(trace, call.roots, call.seeds)
        ledger.add_share(reading.share)
        return reading.examples


def _watched_operations(
    roots: Iterable[Tensor], ledger: Ledger
) -> tuple[list[Operation], list[Any], list[int]]:
    """All watched operations under the roots, all nodes, and their edges; refuses other edges into parameters."""
    operations: list[Operation] = []
    nodes: list[Any] = list(map(_grad_fn, roots))
    seen: dict[Any, int] = {None: -1} | {node: k for k, node in enumerate(nodes)}
    edges: list[int] = []  # by the places of the nodes in the list
    for node in nodes:  # which grows meanwhile
        kind: Any = type(node)
        if kind is _WATCHED:
            known, operation = True, node.operation
            if operation.watched_by is ledger:
                operations.append(operation)
                # With one argument that is no parameter, and a rule, that one has the examples.
                if operation.watched_sources.count(None) > 1 or type(operation) is Generic:
                    look_at_operation(node, operation)
        elif node is None:
            continue
        else:
            known = kind is _DERIVED
            if kind.__name__ in LOOKED_AT:
                look_at(node, ledger)
        for child, own in node.next_functions:
            kind = type(child)
            if not known and (kind is _LEAF or kind is _DERIVED):
                _check_edge(node, child, ledger)
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


def _check_edge(node: Any, child: Any, ledger: Ledger) -> None:
    reached = [child.variable] if type(child) is _LEAF else child.source.roots
    watched = [id(root) for root in reached if id(root) in ledger.parameters]
    if not watched:
        return
    names = ", ".join(repr(ledger.names()[key]) for key in watched)
    raise UnsupportedOperation(
        f"parameter {names} reaches the loss through {node.name()}, which was not watched, so its squared "
        "gradients cannot be known. Run the forward inside the block; call the plain module instead of a "
        "compiled or scripted one; write custom autograd functions with torch operations; leave penalties on "
        "parameters out of the loss (a prior does their work); or leave the parameter out of those watched."
    )


def _count_examples(operations: list[Operation], ledger: Ledger, declared: int | None) -> int:
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
            raise InvalidValue(_misfit(operation, ledger, examples))
    return examples


def _misfit(operation: Operation, ledger: Ledger, examples: int) -> str:
    roots = [root for source in operation.watched_sources if source is not None for root in source.roots]
    names = ", ".join(repr(ledger.names()[id(root)]) for root in roots)
    lead = operation.lead
    got = "no leading dimension" if lead < 0 else f"a leading dimension of {lead}"
    return (
        f"{operation.name} with {names} has {got} where the batch has {examples} examples. The leading "
        "dimension must count examples: use batch_first, keep (B, T, d) instead of (T, B, d), or, where the rows "
        "of one example follow each other as in (B·T, d), say how many examples there are with examples=B. A "
        "constant that meets a parameter (position numbers, a mask) must be a buffer of the module. A "
        "penalty on parameters in the loss has no examples: a prior does its work."
    )
