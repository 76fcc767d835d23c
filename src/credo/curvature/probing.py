"""Examines by numbers whether an operation keeps the examples apart, where its name does not say so.

A node of autograd's graph is a linear map, from gradients of its results to gradients of its arguments. It keeps the
examples apart if gradients of some rows alone come back to the same rows alone. Rows are told from each other by the
bits of their numbers: for each bit, those that have it and those that do not, so that any two are apart in one of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.flows import Graph, Layouts, Mixed
from credo.curvature.layouts import Batch, Layout, Rows, Single


def probed(graph: Graph, node: Any, layouts: Layouts) -> list[Layout] | Layout:
    """The layouts of the results, as the node's own gradients tell; raises `Mixed` where none fits."""
    rows = [(k, layout) for k, layout in enumerate(layouts) if isinstance(layout, Rows)]
    if not rows:
        singles = {layout for layout in layouts if isinstance(layout, Single)}
        if len(singles) > 1:
            raise Mixed("combines rows of different examples")
        return singles.pop() if singles else next((k for k in layouts if isinstance(k, Batch)), None)
    if any(isinstance(layout, Single) for layout in layouts) or len({k.label for _, k in rows}) > 1:
        raise Mixed("combines rows of different examples")
    return [_layout_of(graph, node, own, rows) for own in range(len(node._input_metadata))]


def _layout_of(graph: Graph, node: Any, own: int, rows: list[tuple[int, Rows]]) -> Layout:
    shape = torch.Size(graph.result(node, own))
    if not _has_gradient(node, own):
        return None
    for candidate in _candidates(shape, rows[0][1]):
        if all(_kept_apart(graph, node, own, shape, candidate, rows, mask) for mask in _masks(candidate.rows)):
            return candidate
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


def _kept_apart(
    graph: Graph, node: Any, own: int, shape: torch.Size, layout: Rows, rows: list[tuple[int, Rows]], mask: Tensor
) -> bool:
    meta = node._input_metadata
    grads = [_zeros(graph.result(node, k), m) if _has_gradient(node, k) else None for k, m in enumerate(meta)]
    wave = torch.arange(1, shape.numel() + 1, dtype=torch.float64).mul_(0.7548776662).cos_().add_(1.5)
    grads[own] = _masked(wave.view(shape), layout, mask).to(meta[own].dtype).to(meta[own].device)
    back = _gradients(node, grads)
    for k, argument in rows:
        sent = back[k] if k < len(back) else None
        if sent is not None and bool(_masked(sent, argument, ~mask).any()):
            return False
    return True


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
