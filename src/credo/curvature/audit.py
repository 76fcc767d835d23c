"""Reads the graph of a loss before the backward pass: every use of every watched parameter, and M.

A parameter may only be reached through operations that the block has watched. Anything else (a
forward outside the block, a compiled or scripted model, a custom autograd function) would give it a
gradient without its square, and is refused here, before anything has changed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from credo.curvature.ledger import BackwardPass, Ledger, Use
from credo.curvature.provenance import Derived
from credo.curvature.watched import Watched
from credo.errors import EmptyBatch, InvalidValue, UnsupportedOperation

_OURS: tuple[Any, Any] = (Watched._backward_cls, Derived._backward_cls)
_LEAF = type(torch.ones(1, requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def audit(
    roots: Iterable[Tensor], ledger: Ledger, wanted: frozenset[int], declared: int | None
) -> BackwardPass:
    """The pass about to begin; refuses parameters that it would reach by unwatched ways."""
    uses = [use for node in _watched_nodes(roots, ledger) if (use := node.use).ledger is ledger]
    counts: dict[int, int] = {}
    for use in uses:
        for source in use.sources:
            for root in source.roots if source is not None else ():
                # A use through a computation counts twice: it must wait for the end of the pass.
                counts[id(root)] = counts.get(id(root), 0) + (1 if source.selects else 2)
    single = frozenset([key for key, n in counts.items() if n == 1])
    return BackwardPass(_count_examples(uses, ledger, declared), wanted, single)


def _watched_nodes(roots: Iterable[Tensor], ledger: Ledger) -> Iterator[Any]:
    """All nodes of watched operations under the roots; refuses other edges into watched parameters."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        ours = isinstance(node, _OURS)
        if ours and isinstance(node, _OURS[0]):
            yield node
        for child, _ in node.next_functions:
            if child is None:
                continue
            if not ours:
                _check_edge(node, child, ledger)
            elif type(child) is _LEAF:
                continue
            if child not in seen:
                seen.add(child)
                stack.append(child)


def _check_edge(node: Any, child: Any, ledger: Ledger) -> None:
    variable = getattr(child, "variable", None)
    if variable is not None and id(variable) in ledger.names:
        names = repr(ledger.names[id(variable)])
    elif isinstance(child, _OURS[1]):
        names = ", ".join(repr(ledger.names.get(id(root), "?")) for root in child.source.roots)
    else:
        return
    raise UnsupportedOperation(
        f"parameter {names} reaches the loss through {node.name()}, which was not watched, so its squared "
        "gradients cannot be known. Run the forward inside the block; call the plain module instead of a "
        "compiled or scripted one; write custom autograd functions with torch operations; leave penalties on "
        "parameters out of the loss (a prior does their work); or leave the parameter out of those watched."
    )


def _count_examples(uses: list[Use], ledger: Ledger, declared: int | None) -> int:
    """M: as declared, or the leading dimension of the first watched operation; all others must fit."""
    if not uses:
        return 0
    first = min(uses, key=lambda use: use.order).operation
    examples = (
        declared if declared is not None else first.merged_from or abs(first.lead)
    )  # -1: an image by itself
    if examples == 0:
        raise EmptyBatch("the batch is empty: it has no examples, so no gradient. Skip it.")
    for use in uses:
        operation = use.operation
        fits = operation.lead == examples or operation.merged_from == examples
        if not fits and not (declared and operation.lead > 0 and operation.lead % declared == 0):
            raise InvalidValue(_misfit(use, ledger, examples))
    return examples


def _misfit(use: Use, ledger: Ledger, examples: int) -> str:
    roots = [root for source in use.sources if source is not None for root in source.roots]
    names = ", ".join(repr(ledger.names[id(root)]) for root in roots)
    lead = use.operation.lead
    got = "no leading dimension" if lead < 0 else f"a leading dimension of {lead}"
    return (
        f"{use.operation.name} with {names} has {got} where the batch has {examples} examples. The leading "
        "dimension must count examples: use batch_first, keep (B, T, d) instead of (T, B, d), or, where the rows "
        "of one example follow each other as in (B·T, d), say how many examples there are with examples=B. A "
        "penalty on parameters in the loss has no examples: a prior does its work."
    )
