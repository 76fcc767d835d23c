"""How autograd's operations move the examples: from the layouts of their arguments to that of their result.

One function for a family of operations, chosen by the name that autograd gives to the node. What has no function here
is examined by numbers (`curvature.probing`). Whatever lets two examples meet raises `Mixed`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from credo.curvature.layouts import BATCH, Batch, Layout, Rows, Single, aligned, dims_of, signed, viewed


class Mixed(Exception):
    """Rows of different examples meet; says in which way."""


class Graph(Protocol):
    """What a flow may ask about the graph."""

    examples: int

    def shape(self, node: Any, argument: int) -> Sequence[int]:
        """Of an argument that has a gradient."""

    def result(self, node: Any, own: int = 0) -> Sequence[int]:
        """The shape of a result."""


Layouts = Sequence[Layout]
Flow = Callable[[Graph, Any, Layouts], "Layout | list[Layout]"]

DIFFERENT = "combines rows of different examples"
SPREAD = "spreads the examples over several dimensions, so that some of them share a row"


def same(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Elementwise, with broadcasting: row i of the result is made of the rows i of the arguments."""
    found: Rows | None = None
    single: Single | None = None
    batch = False
    for k, layout in enumerate(layouts):
        if isinstance(layout, Rows):
            own = aligned(layout, graph.shape(node, k), graph.result(node))
            if own is None or (found is not None and own != found):
                raise Mixed(DIFFERENT)
            found = own
        elif isinstance(layout, Single):
            if single is not None and single != layout:
                raise Mixed(DIFFERENT)
            single = layout
        elif layout is not None:
            batch = True
    if found is not None:
        if single is not None and set(found.examples()) != {single.example}:
            raise Mixed(DIFFERENT)
        return found
    return single or (BATCH if batch else None)


def added(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """As `same`; single numbers of several examples are being summed up, as in a loop over examples."""
    if not graph.result(node) and any(isinstance(k, (Single, Batch)) for k in layouts):
        ones = {layout for layout in layouts if layout is not None}
        if len(ones) > 1:
            return BATCH
    return same(graph, node, layouts)


def reshaped(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    rows = viewed(layout, graph.shape(node, 0), graph.result(node))
    if rows is None and 0 not in graph.result(node):
        raise Mixed(SPREAD)
    return rows


def permuted(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    return layout.at(dims_of(node._saved_dims, len(graph.result(node))).index(layout.axis))


def transposed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,), dims = layouts, len(graph.result(node))
    if not isinstance(layout, Rows) or dims < 2:
        return layout
    first, second = (signed(getattr(node, f"_saved_dim{k}", k)) % dims for k in (0, 1))  # t() is of both
    swapped = {first: second, second: first}
    return layout.at(swapped.get(layout.axis, layout.axis))


def along(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Works along a dimension, or several, which must not be that of the examples."""
    layout, dims = same(graph, node, layouts), len(graph.result(node))
    kept = node._saved_dims if hasattr(node, "_saved_dims") else node._saved_dim
    if isinstance(layout, Rows) and layout.axis in dims_of(kept, dims):
        raise Mixed("works along the dimension that counts examples")
    return layout


def picked_along(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """gather, scatter, topk, sort and others whose result has another size along their own dimension."""
    axis = {layout.axis for layout in layouts if isinstance(layout, Rows)}
    own = signed(node._saved_dim) % max(len(graph.result(node)), 1)
    found = {layout for layout in layouts if layout is not None}
    if own in axis or len(found) > 1:
        raise Mixed("picks from the dimension that counts examples")
    layout = found.pop() if found else None
    if (
        isinstance(layout, Rows)
        and graph.result(node)[layout.axis] != layout.outer * layout.rows * layout.inner
    ):
        raise Mixed(DIFFERENT)
    return layout


STATISTICS = frozenset(("Sum", "Mean", "Var", "Std", "VarMean", "StdMean", "Amax", "Nansum"))


def reduced(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Sums, means, norms over some dimensions; over the examples, a statistic of the batch."""
    (layout,) = layouts[:1]
    if not isinstance(layout, Rows):
        return layout
    name, before = type(node).__name__.partition("Backward")[0], graph.shape(node, 0)
    dims = dims_of(getattr(node, "_saved_dim", None), len(before))
    if layout.axis in dims:
        if layout.rows == 1 and layout.outer == layout.inner == 1:
            return Single(next(iter(layout.examples())))
        if name not in STATISTICS:
            raise Mixed("reduces over the dimension that counts examples")
        return BATCH
    if getattr(node, "_saved_keepdim", False):
        return layout
    return layout.at(layout.axis - sum(d < layout.axis for d in dims))


def unsqueezed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    place = signed(node._saved_dim) % len(graph.result(node))
    return layout.at(layout.axis + (place <= layout.axis))


def squeezed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    before = graph.shape(node, 0)
    dims = dims_of(getattr(node, "_saved_dim", None), len(before))
    gone = [d for d in dims if before[d] == 1]
    if layout.axis in gone:
        return Single(next(iter(layout.examples())))
    return layout.at(layout.axis - sum(d < layout.axis for d in gone))


def normalised(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Layer and RMS norms, over the last dimensions."""
    layout = layouts[0]
    if isinstance(layout, Rows) and layout.axis >= len(graph.result(node)) - len(
        node._saved_normalized_shape
    ):
        raise Mixed("normalises over the dimension that counts examples")
    return same(graph, node, layouts[:1])


def kept(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Batch norms, which mix the examples by their statistics alone, as is documented; group norms, complex views."""
    return layouts[0]


def unfolded(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    layout = layouts[0]
    if isinstance(layout, Rows) and signed(node._saved_dimension) % len(graph.shape(node, 0)) == layout.axis:
        raise Mixed("works along the dimension that counts examples")
    return layout


def spatial(dims: int) -> Flow:
    """Pools, paddings and interpolations over the last dimensions."""

    def flow(graph: Graph, node: Any, layouts: Layouts) -> Layout:
        layout = layouts[0]
        if isinstance(layout, Rows) and layout.axis >= len(graph.shape(node, 0)) - dims:
            raise Mixed("works along the dimension that counts examples")
        return layout

    return flow


def lossy(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """mse_loss and its like: elementwise, and reduced over everything if asked to."""
    if node._saved_reduction == 0:
        return same(graph, node, layouts)
    for k, layout in enumerate(layouts):  # the arguments have to fit each other all the same
        if isinstance(layout, Rows) and any(isinstance(o, Rows) and o != layout for o in layouts[k + 1 :]):
            raise Mixed(DIFFERENT)
    found = [layout for layout in layouts if layout is not None]
    return found[0] if found and isinstance(found[0], Single) else BATCH if found else None


def chosen(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """nll_loss: one of the classes, which are the second dimension of rows and the first of a single one."""
    layout, before = layouts[0], graph.shape(node, 0)
    if not isinstance(layout, Rows):
        return layout
    if layout.axis == min(len(before), 2) - 1:
        raise Mixed("takes the dimension that counts examples for that of the classes")
    return BATCH if node._saved_reduction else layout.at(layout.axis - (layout.axis > 1))


def aligned_in_time(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """ctc_loss, from (T, M, C) to (M,)."""
    layout = layouts[0]
    if isinstance(layout, Rows) and layout.axis != 1:
        raise Mixed("takes the dimension that counts examples for time or classes")
    return layout.at(0) if isinstance(layout, Rows) else layout
