"""How autograd's operations move the examples: from the layouts of their arguments to that of their result.

One function for a family of operations, chosen by the name that autograd gives to the node. What has no function here
is examined by numbers (`curvature.flow_lookup`). Whatever lets two examples meet raises `Mixed`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from credo.curvature.layouts import (
    WHOLE_BATCH,
    Layout,
    Rows,
    Single,
    WholeBatch,
    aligned,
    dims_of,
    labelled,
    signed,
    viewed,
)
from credo.curvature.torch_private import results_of, saved


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
    return single or (WHOLE_BATCH if batch else None)


def added(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """As `same`; single numbers of several examples are being summed up, as in a loop over examples."""
    if not graph.result(node) and any(isinstance(k, (Single, WholeBatch)) for k in layouts):
        ones = {layout for layout in layouts if layout is not None}
        if len(ones) > 1:
            return WHOLE_BATCH
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
    return layout.at(dims_of(saved(node, "dims"), len(graph.result(node))).index(layout.axis))


def transposed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,), dims = layouts, len(graph.result(node))
    if not isinstance(layout, Rows) or dims < 2:
        return layout
    first, second = (signed(saved(node, f"dim{k}", k)) % dims for k in (0, 1))  # t() is of both
    swapped = {first: second, second: first}
    return layout.at(swapped.get(layout.axis, layout.axis))


def along(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Works along a dimension, or several, which must not be that of the examples."""
    layout, dims = same(graph, node, layouts), len(graph.result(node))
    kept = saved(node, "dims", None)
    kept = saved(node, "dim") if kept is None else kept
    if isinstance(layout, Rows) and layout.axis in dims_of(kept, dims):
        raise Mixed("works along the dimension that counts examples")
    return layout


def picked_along(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """gather, scatter, topk, sort and others whose result has another size along their own dimension."""
    axis = {layout.axis for layout in layouts if isinstance(layout, Rows)}
    own = signed(saved(node, "dim")) % max(len(graph.result(node)), 1)
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
    dims = dims_of(saved(node, "dim", None), len(before))
    if layout.axis in dims:
        if layout.rows == 1 and layout.outer == layout.inner == 1:
            return Single(next(iter(layout.examples())))
        if name not in STATISTICS:
            raise Mixed("reduces over the dimension that counts examples")
        return WHOLE_BATCH
    if saved(node, "keepdim", False):
        return layout
    return layout.at(layout.axis - sum(d < layout.axis for d in dims))


def unsqueezed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    place = signed(saved(node, "dim")) % len(graph.result(node))
    return layout.at(layout.axis + (place <= layout.axis))


def squeezed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    before = graph.shape(node, 0)
    dims = dims_of(saved(node, "dim", None), len(before))
    gone = [d for d in dims if before[d] == 1]
    if layout.axis in gone:
        return Single(next(iter(layout.examples())))
    return layout.at(layout.axis - sum(d < layout.axis for d in gone))


def normalised(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Layer and RMS norms, over the last dimensions."""
    layout = layouts[0]
    if isinstance(layout, Rows) and layout.axis >= len(graph.result(node)) - len(
        saved(node, "normalized_shape")
    ):
        raise Mixed("normalises over the dimension that counts examples")
    return same(graph, node, layouts[:1])


def normalised_in_groups(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Group norms: over places, and over the channels of a group."""
    layout = layouts[0]
    alone = saved(node, "group") == saved(node, "C")
    if isinstance(layout, Rows) and (layout.axis > 1 or (layout.axis == 1 and not alone)):
        raise Mixed("normalises over the dimension that counts examples")
    return layout


def kept(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Batch norms, which mix the examples by their statistics alone, as is documented; complex views."""
    return layouts[0]


def each(graph: Graph, node: Any, layouts: Layouts) -> list[Layout]:
    """Every argument is handed on as a result."""
    return list(layouts)


def unfolded(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    layout = layouts[0]
    if (
        isinstance(layout, Rows)
        and signed(saved(node, "dimension")) % len(graph.shape(node, 0)) == layout.axis
    ):
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
    if saved(node, "reduction") == 0:
        return same(graph, node, layouts)
    for k, layout in enumerate(layouts):  # the arguments have to fit each other all the same
        if isinstance(layout, Rows) and any(isinstance(o, Rows) and o != layout for o in layouts[k + 1 :]):
            raise Mixed(DIFFERENT)
    found = [layout for layout in layouts if layout is not None]
    return found[0] if found and isinstance(found[0], Single) else WHOLE_BATCH if found else None


def chosen(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """nll_loss: one of the classes, which are the second dimension of rows and the first of a single one."""
    layout, before = layouts[0], graph.shape(node, 0)
    if not isinstance(layout, Rows):
        return layout
    if layout.axis == min(len(before), 2) - 1:
        raise Mixed("takes the dimension that counts examples for that of the classes")
    return WHOLE_BATCH if saved(node, "reduction") else layout.at(layout.axis - (layout.axis > 1))


def aligned_in_time(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """ctc_loss, from (T, M, C) to (M,)."""
    layout = layouts[0]
    if isinstance(layout, Rows) and layout.axis != 1:
        raise Mixed("takes the dimension that counts examples for time or classes")
    return layout.at(0) if isinstance(layout, Rows) else layout


# ────────────────────────────────────────
# How the examples move where rows are picked, joined or repeated.


def selected(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    dim = signed(saved(node, "dim")) % len(graph.shape(node, 0))
    if dim == layout.axis:
        return Single(layout.positions()[signed(saved(node, "index"))])
    return layout.at(layout.axis - (dim < layout.axis))


def sliced(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    dim = signed(saved(node, "dim")) % len(graph.result(node))
    if dim != layout.axis or graph.result(node)[dim] == graph.shape(node, 0)[dim]:
        return layout
    start, end = (
        signed(saved(node, "start") or 0),
        min(signed(saved(node, "end") or 0), graph.shape(node, 0)[dim]),
    )
    kept = layout.positions()[slice(start, end, saved(node, "step"))]
    return labelled(layout.axis, kept, graph.examples)


def split(graph: Graph, node: Any, layouts: Layouts) -> Layout | list[Layout]:
    (layout,), parts = layouts, len(results_of(node))
    dim = signed(saved(node, "dim")) % len(graph.result(node))
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
    dim = signed(saved(node, "dim")) % dims
    if not isinstance(layout, Rows):
        return layout
    if dim == layout.axis:
        return [Single(i) for i in layout.positions()]
    return layout.at(layout.axis - (dim < layout.axis))


def stacked(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    dim = signed(saved(node, "dim")) % len(graph.result(node))
    if layouts and all(isinstance(layout, Single) for layout in layouts):
        return labelled(dim, [k.example for k in layouts if isinstance(k, Single)], graph.examples)
    layout = _agreed(layouts)
    return layout.at(layout.axis + (dim <= layout.axis)) if isinstance(layout, Rows) else layout


def joined(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """cat: along another dimension, or of parts of a batch that follow each other."""
    dim = signed(saved(node, "dim")) % len(graph.result(node))
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
    return found.pop() if found else WHOLE_BATCH if WHOLE_BATCH in layouts else None


def repeated(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    (layout,) = layouts
    if not isinstance(layout, Rows):
        return layout
    times, before = tuple(saved(node, "repeats")), graph.shape(node, 0)
    axis = layout.axis + len(times) - len(before)
    if times[axis] == 1:
        return layout.at(axis)
    return labelled(axis, layout.positions() * times[axis], graph.examples)


def indexed(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """z[indices]: along other dimensions, or some rows, or an element of each row: z[arange(M), y]."""
    layout = layouts[0]
    if not isinstance(layout, Rows):
        return layout
    indices = _spelt_out(saved(node, "indices"))
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
    mask = saved(node, "mask").expand(torch.Size(graph.shape(node, 0)))
    known = layout.positions()
    return labelled(0, [known[i] for i in mask.nonzero()[:, layout.axis].tolist()], graph.examples)


def index_selected(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    layout = layouts[0]
    if not isinstance(layout, Rows) or signed(saved(node, "dim")) % len(graph.result(node)) != layout.axis:
        return layout
    known = layout.positions()
    return labelled(layout.axis, [known[i] for i in saved(node, "index").flatten().tolist()], graph.examples)


# ────────────────────────────────────────
# How the examples move in products of matrices.

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
        if isinstance(other, WholeBatch) and not isinstance(layout, WholeBatch):
            return layout
        if isinstance(layout, WholeBatch) and other is not None and not isinstance(other, WholeBatch):
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
    if isinstance(own, WholeBatch) or own is None:
        return found or own
    if found is not None and not isinstance(found, WholeBatch) and found != own:
        raise Mixed(DIFFERENT)
    return own


def dotted(graph: Graph, node: Any, layouts: Layouts) -> Layout:
    """Σᵢ aᵢbᵢ: a sum over the examples, if they are in it."""
    rows = {layout for layout in layouts if isinstance(layout, Rows)}
    if len(rows) > 1:
        raise Mixed(DIFFERENT)
    return WHOLE_BATCH if rows else same(graph, node, layouts)


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
    if len(found) > 1 and not all(isinstance(k, WholeBatch) for k in found):
        raise Mixed(DIFFERENT)
    if isinstance(layout, Rows) and layout.axis >= len(graph.result(node)) - 2:
        raise Mixed("works along the dimension that counts examples")
    return layout
