"""Several passes under one backward pass, of one model or of several: whether their rows are the same examples.

Row i of each pass is example i, as long as rows of the passes meet before the losses are put together, or the loss is a
sum of terms for each example. Where it is one mean over passes that have nothing in common but parameters, their rows
may as well be examples of their own: halves of a batch, rows that were sent to different experts, or a loop over single
examples. That raises.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.flow_lookup import operation_name
from credo.curvature.torch_private import results_of
from credo.curvature.trace import DERIVED, LEAF
from credo.errors import UnsupportedOperation

# Through these a sum of losses stays a sum of losses; through the latter if one of the factors is constant.
_NAMES = """
Add Sub Rsub Neg Mul Div Sum Mean Nansum Dot Vdot Mv Mm Where MaskedFill
View UnsafeView ReshapeAlias Unsqueeze Squeeze Expand Repeat Permute Transpose T
Select Slice Stack Cat Index IndexSelect Unbind Split ToCopy Clone Alias
"""
LINEAR = frozenset(_NAMES.split())
BILINEAR = frozenset(("Mul", "Dot", "Vdot", "Mv", "Mm"))


def separate(passes: int) -> str:
    return (
        f"the loss is put together from {passes} passes through the model that have nothing in common but parameters. "
        "Whether row i of each is the same example, or all rows are examples of their own, cannot be told, and the "
        "squares differ. Examples of their own: run them as one batch, torch.cat((x1, x2)), or call backward for each. "
        "The same examples: add their losses example by example before the mean, (losses1 + losses2).mean(), or "
        "declare examples=M (credo.capture)."
    )


def check_one_example(roots: Sequence[Tensor], samples: int = 1) -> None:
    """For rows that come alone: raises where they are examples of a batch, each with a pass of its own.

    Several samples that are computed at once have a loss each, (K,), where else there is one number.
    """
    starts, seen, one = [], set(), ((), (samples,)) if samples > 1 else ((),)
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions if child is not None]
        name = operation_name(type(node))
        numbers = tuple(results_of(node)[0].shape) in one or all(  # where rows are added, they meet
            tuple(results_of(child)[own].shape) in one
            for child, own in node.next_functions
            if child is not None
        )
        if name not in LINEAR or not numbers or (name in (*BILINEAR, "Div") and len(children) > 1):
            starts.append(node)
        else:
            todo += children
    if len(starts) > 1 and (apart := passes_apart(starts, of_one_model=True)):
        raise UnsupportedOperation(separate(len(apart)))


def check_mean(starts: Sequence[Any], shares: Sequence[float]) -> None:
    """For parts of a loss and how much of a mean each is: raises where passes are a mean together, not each."""
    apart = passes_apart(starts, of_one_model=True)
    if apart and abs(sum(max(shares[k] for k in group) for group in apart) - 1) < 1e-4:
        raise UnsupportedOperation(separate(len(apart)))


def check_sums(starts: Sequence[Any]) -> None:
    """For parts of a sum."""
    if apart := passes_apart(starts, of_one_model=True):
        raise UnsupportedOperation(separate(len(apart)))


# Operations that put rows of several tensors into one.
JOINS = frozenset(
    (
        "CatBackward0",
        *(
            "IndexPutBackward0",
            "CopySlices",
            "MaskedScatterBackward0",
            "ScatterBackward0",
            "IndexCopyBackward0",
        ),
        *("SliceScatterBackward0", "SelectScatterBackward0"),
    )
)


def check_joined(node: Any, by_rows: bool) -> None:
    """For passes that are put behind or between each other: raises where they may have the same examples, or others."""
    starts = [child for child, _ in node.next_functions if child is not None] if by_rows else []
    if len(starts) > 1 and (apart := passes_apart(starts)):
        raise UnsupportedOperation(separate(len(apart)))


def passes_apart(starts: Sequence[Any], of_one_model: bool = False) -> list[list[int]]:
    """Groups of these nodes with nothing in common beneath them but parameters; empty if there is one only.

    Groups without parameters do not count; of one model only those do that share parameters with another one.
    """
    group, owner = list(range(len(starts))), dict[Any, int]()
    used: list[set[int]] = [set() for _ in starts]

    def leader(k: int) -> int:
        while group[k] != k:
            k = group[k]
        return k

    for k, start in enumerate(starts):
        todo = [start]
        while todo:
            node = todo.pop()
            if node in owner:
                group[leader(owner[node])] = leader(k)
                continue
            if type(node) is LEAF and isinstance(node.variable, torch.nn.Parameter):
                used[k].add(id(node.variable))
                continue
            if type(node) is DERIVED:
                used[k].update(map(id, node.source.roots))
                continue
            owner[node] = k
            todo += [child for child, _ in node.next_functions if child is not None]
    members: dict[int, list[int]] = {}
    for k in range(len(starts)):
        members.setdefault(leader(k), []).append(k)
    parameters = [set().union(*(used[k] for k in found)) for found in members.values()]
    counts = [
        any(own & other for m, other in enumerate(parameters) if m != k) if of_one_model else bool(own)
        for k, own in enumerate(parameters)
    ]
    found = [own for own, also in zip(members.values(), counts, strict=True) if also]
    return found if len(found) > 1 else []
