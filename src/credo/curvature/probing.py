"""Examines by numbers whether an operation keeps the examples apart, where its name does not say so.

A node of autograd's graph is a linear map, from gradients of its results to gradients of its arguments. It keeps the
examples apart if gradients of some rows alone come back to the same rows alone. Rows are told from each other by the
bits of their numbers: for each bit, those that have it and those that do not, so that any two are apart in one of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.flows import DIFFERENT, Graph, Layouts, Mixed
from credo.curvature.layouts import Batch, Layout, Rows, Single
from credo.curvature.rules import Generic

Places = list[tuple[int, Rows | Single]]


def probed(graph: Graph, node: Any, layouts: Layouts) -> list[Layout] | Layout:
    """The layouts of the results, as the node's own gradients tell; raises `Mixed` where none fits."""
    places: Places = [(k, layout) for k, layout in enumerate(layouts) if isinstance(layout, (Rows, Single))]
    if not places:
        return next((k for k in layouts if isinstance(k, Batch)), None)
    labels = {layout.label for _, layout in places if isinstance(layout, Rows)}
    singles = {layout for _, layout in places if isinstance(layout, Single)}
    if len(labels) > 1 or (singles and labels - {None}):
        raise Mixed(DIFFERENT)
    return [_layout_of(graph, node, own, places) for own in range(len(node._input_metadata))]


def _layout_of(graph: Graph, node: Any, own: int, places: Places) -> Layout:
    if not _has_gradient(node, own):
        return None
    known = next((k for _, k in places if isinstance(k, Rows)), Rows(0, 1, graph.examples, 1))
    for candidate in _candidates(graph.result(node, own), known):
        if all(_kept_apart(graph, node, own, candidate, places, mask) for mask in _masks(candidate.rows)):
            return candidate
    alone = {layout for _, layout in places}
    if len(alone) == 1 and isinstance(places[0][1], Single):
        return places[0][1]
    raise Mixed("lets rows of different examples meet")


def _has_gradient(node: Any, own: int) -> bool:
    """Results of whole numbers, such as the places of maxima, have none."""
    dtype = getattr(node._input_metadata[own], "dtype", torch.float32)
    return bool(dtype.is_floating_point or dtype.is_complex)


def _candidates(shape: Sequence[int], known: Rows) -> Iterator[Rows]:
    """Where the examples may be in the result: first where they have been in the argument."""
    axes = sorted(range(len(shape)), key=lambda axis: axis != known.axis)
    for axis in axes:
        merged, rest = divmod(shape[axis], known.rows)
        if rest or not merged:
            continue
        yield Rows(axis, 1, known.rows, merged, known.label if merged == 1 else None)
        if merged > 1:
            yield Rows(axis, merged, known.rows, 1)


def _masks(rows: int) -> Iterator[Tensor]:
    numbers = torch.arange(rows)
    for bit in range(max(rows - 1, 1).bit_length()):
        has = (numbers >> bit) % 2 == 1
        yield has
        yield ~has


def _kept_apart(graph: Graph, node: Any, own: int, layout: Rows, places: Places, mask: Tensor) -> bool:
    meta, shape = node._input_metadata, torch.Size(graph.result(node, own))
    grads = [_zeros(graph.result(node, k), m) if _has_gradient(node, k) else None for k, m in enumerate(meta)]
    grads[own] = _masked(_wave(shape), layout, mask).to(meta[own].dtype).to(meta[own].device)
    back = _gradients(node, grads)
    return not any(_comes_elsewhere(back[k], argument, mask) for k, argument in places if k < len(back))


def _comes_elsewhere(sent: Tensor | None, argument: Rows | Single, mask: Tensor) -> bool:
    """Whether something comes back to rows that nothing was sent from."""
    if sent is None:
        return False
    if isinstance(argument, Single):
        return not bool(mask[argument.example]) and bool(sent.any())
    return bool(_masked(sent, argument, ~mask).any())


def keeps_apart(operation: Generic, layouts: Layouts, results: Layouts) -> bool:
    """Whether an operation without a rule does, which runs in a graph of its own."""
    places = [
        (k, layout) for k, layout in enumerate(layouts) if isinstance(layout, Rows) and layout.label is None
    ]
    own = [operation._own[k] for k, _ in places]
    pairs = [
        (out, layout)
        for out, layout in zip(operation._outputs, results, strict=True)
        if isinstance(layout, Rows) and out.requires_grad
    ]
    for mask in _masks(pairs[0][1].rows) if own and pairs else ():
        sent = [_masked(_wave(out.shape).to(out), layout, mask) for out, layout in pairs]
        back = torch.autograd.grad([o for o, _ in pairs], own, sent, retain_graph=True, allow_unused=True)
        if any(_comes_elsewhere(grad, layout, mask) for grad, (_, layout) in zip(back, places, strict=True)):
            return False
    return True


def _wave(shape: Sequence[int]) -> Tensor:
    """Numbers that do not cancel each other."""
    count = torch.Size(shape).numel()
    wave = torch.arange(1, count + 1, dtype=torch.float64).mul_(0.7548776662).cos_().add_(1.5)
    return wave.view(tuple(shape))


def _gradients(node: Any, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
    try:
        with torch.no_grad():
            back = node.apply(*grads) if hasattr(node, "saved_tensors") else node(*grads)
    except Exception as error:
        raise Mixed(f"could not be examined ({type(error).__name__}: {error})") from error
    return back if isinstance(back, tuple) else (back,)


def _zeros(shape: Sequence[int], meta: Any) -> Tensor:
    return torch.zeros(tuple(shape), dtype=meta.dtype, device=meta.device)


def _masked(tensor: Tensor, layout: Rows, mask: Tensor) -> Tensor:
    """The tensor with zeros in the rows that the mask does not have."""
    spread = mask.to(tensor.device).repeat_interleave(layout.inner).repeat(layout.outer)
    return tensor * spread.view(-1, *[1] * (tensor.dim() - 1 - layout.axis))
