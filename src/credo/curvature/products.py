"""How the examples move in products of matrices; as in `curvature.flows`."""

from typing import Any

from credo.curvature.flows import DIFFERENT, Graph, Layouts, Mixed, same
from credo.curvature.layouts import BATCH, Batch, Layout, Rows, Single, aligned

COMPARED = "multiplies examples with one another"


def product(first: Layout, second: Layout, dims: tuple[int, int], result: int) -> Layout:
    """(…, n, k) @ (…, k, m) of so many dimensions; the second operand may be a vector."""
    kept = {-2: result - 2, -1: result - 1} if dims[1] > 1 else {-2: result - 1}
    found: Layout = None
    for layout, own, summed, other in ((first, dims[0], -1, second), (second, dims[1], -2, first)):
        if layout is None:
            continue
        if isinstance(layout, Rows):
            place = layout.axis - own  # from the back
            if place == (summed if own > 1 else -1):
                raise Mixed("sums over the dimension that counts examples")
            layout = layout.at(kept.get(place, layout.axis + result - own if place < -2 else result - 1))
        if isinstance(other, Batch) and not isinstance(layout, Batch):
            return layout
        if isinstance(layout, Batch) and other is not None and not isinstance(other, Batch):
            continue
        if found is not None and layout != found:
            raise Mixed(COMPARED)
        found = layout
    return found


def multiplied(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """mm, mv and bmm."""
    first, second = layouts
    # Of an argument without gradient the number of dimensions follows from the name of the operation.
    dims = {"MvBackward0": (2, 1), "MmBackward0": (2, 2)}.get(type(node).__name__, (3, 3))
    return product(first, second, dims, len(graph.result(node)))


def added_product(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """addmm, addmv and baddbmm."""
    own, first, second = layouts
    dims = {"AddmvBackward0": (2, 1), "AddmmBackward0": (2, 2)}.get(type(node).__name__, (3, 3))
    found = product(first, second, dims, len(graph.result(node)))
    if isinstance(own, Rows):
        own = aligned(own, graph.shape(node, 0), graph.result(node))
        if own is None:
            raise Mixed(DIFFERENT)
    if isinstance(own, Batch) or own is None:
        return found or own
    if found is not None and not isinstance(found, Batch) and found != own:
        raise Mixed(DIFFERENT)
    return own


def dotted(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Σᵢ aᵢbᵢ: a sum over the examples, if they are in it."""
    rows = {layout for layout in layouts if isinstance(layout, Rows)}
    if len(rows) > 1:
        raise Mixed(DIFFERENT)
    return BATCH if rows else same(graph, node, layouts)


def mapped(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """linear: the last dimension is mapped."""
    layout, weight = layouts[0], layouts[1]
    if isinstance(weight, Rows) or (isinstance(weight, Single) and weight != layout):
        raise Mixed("takes rows of examples for a weight that all of them share")
    if isinstance(layout, Rows) and layout.axis == len(graph.result(node)) - 1:
        raise Mixed("sums over the dimension that counts examples")
    return layout


def convolved(graph: Graph, node: Any, layouts: Layouts) -> Layout | None:
    """With one weight for all; what has a weight for each example is left to probing."""
    layout = layouts[0]
    if any(isinstance(other, (Rows, Single)) for other in layouts[1:]):
        raise LookupError
    if isinstance(layout, Rows) and layout.axis:
        raise LookupError
    return layout


def attended(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """scaled_dot_product_attention on (…, T, d): positions and features are the last dimensions."""
    found = {layout for layout in layouts[:3] if layout is not None}
    (layout,) = found if len(found) == 1 else (None,)
    if len(found) > 1 and not all(isinstance(k, Batch) for k in found):
        raise Mixed(DIFFERENT)
    if isinstance(layout, Rows) and layout.axis >= len(graph.result(node)) - 2:
        raise Mixed("works along the dimension that counts examples")
    return layout
