"""How the examples move where rows are picked, joined or repeated; as in `curvature.flows`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.flows import DIFFERENT, Graph, Layouts, Mixed
from credo.curvature.layouts import BATCH, Layout, Rows, Single, labelled, signed


def selected(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    dim = signed(node._saved_dim) % len(graph.shape(node, 0))
    if dim == layout.axis:
        return Single(layout.positions()[signed(node._saved_index)])
    return layout.at(layout.axis - (dim < layout.axis))


def sliced(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    dim = signed(node._saved_dim) % len(graph.result(node))
    if dim != layout.axis or graph.result(node)[dim] == graph.shape(node, 0)[dim]:
        return layout
    start, end = signed(node._saved_start or 0), min(signed(node._saved_end or 0), graph.shape(node, 0)[dim])
    kept = layout.positions()[slice(start, end, node._saved_step)]
    return labelled(layout.axis, kept, graph.examples)


def split(graph: Graph, node: Any, layouts: Layouts) -> Layout | list[Layout]:
    (layout,), parts = layouts, len(node._input_metadata)
    dim = signed(node._saved_dim) % len(graph.result(node))
    if not isinstance(layout, Rows) or dim != layout.axis:
        return layout
    positions, found, first = layout.positions(), [], 0
    for k in range(parts):
        size = graph.result(node, k)[dim]
        found.append(labelled(dim, positions[first : first + size], graph.examples))
        first += size
    return list(found)


def unbound(graph: Graph, node: Any, layouts: Layouts) -> Layout | list[Layout]:
    (layout,), dims = layouts, len(graph.result(node)) + 1
    dim = signed(node._saved_dim) % dims
    if not isinstance(layout, Rows):
        return layout
    if dim == layout.axis:
        return [Single(i) for i in layout.positions()]
    return layout.at(layout.axis - (dim < layout.axis))


def stacked(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    dim = signed(node._saved_dim) % len(graph.result(node))
    if layouts and all(isinstance(layout, Single) for layout in layouts):
        return labelled(dim, [k.example for k in layouts if isinstance(k, Single)], graph.examples)
    layout = _agreed(layouts)
    return layout.at(layout.axis + (dim <= layout.axis)) if isinstance(layout, Rows) else layout


def joined(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """cat: along another dimension, or of parts of a batch that follow each other."""
    dim = signed(node._saved_dim) % len(graph.result(node))
    if len({layout for layout in layouts if layout is not None}) == 1 and isinstance(layouts[0], Single):
        return layouts[0]
    label: list[int] = []
    for k, layout in enumerate(layouts):
        if isinstance(layout, Rows) and layout.axis == dim:
            label += layout.positions()
        elif isinstance(layout, Single):
            label += [layout.example] * graph.shape(node, k)[dim]
        elif any(isinstance(o, Rows) and o.axis == dim for o in layouts):
            raise Mixed("joins rows of examples with rows that are none")
    return labelled(dim, label, graph.examples) if label else _agreed(layouts)


def _agreed(layouts: Layouts) -> Layout:
    found = {layout for layout in layouts if isinstance(layout, (Rows, Single))}
    if len(found) > 1:
        raise Mixed(DIFFERENT)
    return found.pop() if found else BATCH if BATCH in layouts else None


def repeated(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    times, before = tuple(node._saved_repeats), graph.shape(node, 0)
    axis = layout.axis + len(times) - len(before)
    if times[axis] == 1:
        return layout.at(axis)
    return labelled(axis, layout.positions() * times[axis], graph.examples)


def indexed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """z[indices]: along other dimensions, or some rows, or an element of each row: z[arange(M), y]."""
    layout = layouts[0]
    if not isinstance(layout, Rows):
        return layout
    indices = _spelt_out(node._saved_indices)
    places = [k for k, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(indices[k].shape for k in places))  # type: ignore[no-untyped-call]
    adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if adjacent else 0
    if layout.axis not in places:
        before = sum(k < layout.axis for k in places)
        after_all = not adjacent or places[0] < layout.axis
        return layout.at(layout.axis - before + (len(shape) if after_all else 0))
    index = indices[layout.axis]
    wide = [d for d, size in enumerate(index.shape) if size > 1]
    if index.numel() == 1:
        example = layout.positions()[int(index)]
        return Single(example) if not shape else labelled(start, [example] * shape[0], graph.examples)
    if len(wide) != 1:
        raise Mixed("picks rows by an index of several dimensions")
    known = layout.positions()
    label = [known[i] for i in index.flatten().tolist()]
    return labelled(start + wide[0] + len(shape) - index.dim(), label, graph.examples)


def _spelt_out(indices: Sequence[Tensor | None]) -> list[Any]:
    """Masks as the indices of what they keep; None for a dimension that is kept whole."""
    found: list[Any] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        found.extend(index.nonzero(as_tuple=True) if masks and index is not None else [index])
    return found


def masked(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """masked_select: the elements that are kept, in a row."""
    layout = layouts[0]
    if not isinstance(layout, Rows):
        return layout
    mask = node._saved_mask.expand(torch.Size(graph.shape(node, 0)))
    known = layout.positions()
    return labelled(0, [known[i] for i in mask.nonzero()[:, layout.axis].tolist()], graph.examples)


def index_selected(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    layout = layouts[0]
    if not isinstance(layout, Rows) or signed(node._saved_dim) % len(graph.result(node)) != layout.axis:
        return layout
    known = layout.positions()
    return labelled(layout.axis, [known[i] for i in node._saved_index.flatten().tolist()], graph.examples)
