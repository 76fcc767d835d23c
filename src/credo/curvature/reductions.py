"""Reads from the graph over which examples a loss is a mean, so that the mean can be undone.

From the root down, as long as all examples are in it, the graph must be linear: the loss is Σᵢ cᵢ·lᵢ then. A mean node
counts the rows that it is given, nll_loss those that it does not ignore, and a sum that is divided by a number must be
divided by the number of rows that it was over. What cannot be read raises.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.curvature.accumulate import Share
from credo.curvature.flow_lookup import operation_name
from credo.curvature.layouts import Rows, Single, WholeBatch, signed
from credo.curvature.passes import BILINEAR, LINEAR, check_mean, check_sums
from credo.curvature.torch_private import creation_order, results_of, saved
from credo.curvature.trace import LEAF, Trace
from credo.errors import UnsupportedOperation

# ────────────────────────────────────────
# What is said about a loss that is no mean, or none that can be read.

REMEDY = (
    "Take the mean of the losses of single examples (reduction='none', then .mean()), let the closure return them, or "
    "declare reduction='sum' and sum them."
)


def not_linear(name: str) -> str:
    return (
        f"{name} comes after the examples were reduced to one number, so the loss is neither a mean nor a sum over "
        f"examples, and no example has a loss of its own. {REMEDY} IVON and BayesByBackprop need no gradients of "
        "single examples."
    )


def unreadable(name: str, divisor: float, count: int, everything: int) -> str:
    if abs(divisor - 1) < 1e-6:
        return (
            f"reduction='mean' is declared, but {name} sums the losses of {count} examples, so the squares would be "
            f"{count}² times too large. Declare reduction='sum', or take the mean."
        )
    return (
        f"{name} sums the losses of {count} examples in a batch of {everything}, and the sum is divided by "
        f"{divisor:.6g}, so over how many examples the loss is a mean cannot be told. Divide by their number, or "
        f"weighted losses by the sum of their weights. {REMEDY}"
    )


# ────────────────────────────────────────
# Masks and weights between the losses of rows and the sum over them: what each element of a sum counts.

_PASSED = frozenset(("Neg", "ToCopy", "Clone", "Alias", "Add", "Sub", "View", "UnsafeView", "ReshapeAlias"))
_FARTHEST = 16


def readings(
    trace: Trace, node: Any, own: int, layout: Rows, first: Tensor | None = None
) -> Iterator[Tensor | None]:
    """Ways to read what is summed, as weights of losses: none first, then with one mask or weight after the other.

    (w * mask * loss).sum() is a sum of all, or of those in the mask. Weights have the shape of what is summed; factors
    that are the same for all rows are part of the losses. `first` is a factor that the sum itself applies.
    """
    shape = tuple(results_of(node)[own].shape)
    weights = None if first is None else first.to(torch.float64).expand(shape)
    yield weights
    for _ in range(_FARTHEST):
        name = operation_name(type(node))
        if name.startswith("NllLoss") and saved(node, "reduction") == 0:
            found = _class_weights(node)
            if found.numel() == math.prod(shape) and not bool((found == 1).all()):
                found = found.reshape(shape)
                yield found if weights is None else weights * found
            return
        edges = [k for k, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(edges) != 1 or tuple(results_of(node)[own].shape) != shape:
            return
        factor = _factor(node, name, edges[0])
        if factor is None:
            return
        if factor is not _ONE and _varies(factor, shape, layout):
            spread = factor.to(torch.float64).expand(shape)
            weights = spread if weights is None else weights * spread
            yield weights
        node, own = node.next_functions[edges[0]]
        if type(node) is LEAF or trace.layout(node, own) != layout:
            return


_ONE = torch.ones(())


def _factor(node: Any, name: str, edge: int) -> Tensor | None:
    """By what a node multiplies its only argument with a gradient; None if it does something else."""
    if name == "Mul":
        other: Tensor | None = saved(node, "self") if edge else saved(node, "other")
        return other
    found: Tensor | None = _ONE if name in _PASSED else None
    if name == "Div" and not edge:
        found = 1 / torch.as_tensor(saved(node, "other"))
    elif name == "Where":
        found = ~saved(node, "condition") if edge else saved(node, "condition")
    elif name == "MaskedFill":
        found = ~saved(node, "mask")
    return found


def _varies(factor: Tensor, shape: tuple[int, ...], layout: Rows) -> bool:
    """Whether rows have factors of their own."""
    place = layout.axis - (len(shape) - factor.dim())
    if place < 0 or factor.shape[place] == 1:
        return False
    return not bool((factor == factor.narrow(place, 0, 1)).all())


# ────────────────────────────────────────
# Where the examples of a batch are put together: the places, from the loss down, at which they were still apart.
#
# Above such a place all examples are in every number, and the graph must be linear: else the loss is no sum Σᵢ cᵢ·lᵢ.

LOSSES = frozenset(
    (
        *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
    )
)


class Place(NamedTuple):
    """Where examples meet: an argument of a node (−1: the node's own result), and the gradient that arrives there."""

    node: Any
    argument: int
    grad: Tensor
    layout: Rows | Single
    divisors: frozenset[float]  # by which everything was divided on the way

    @property
    def is_number(self) -> bool:
        """Whether it is the number of one example."""
        return isinstance(self.layout, Single) and self.argument < 0


def places_of(trace: Trace, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> list[Place]:
    """All places, from the root down, at which examples that were apart are put together."""
    found: list[Place] = []
    arrived: dict[Any, _Arrived] = {}
    for root, seed in zip(roots, seeds, strict=True):
        node, grad = root.grad_fn, torch.ones_like(root) if seed is None else seed
        if node is None:
            continue
        layout = trace.layout(node, root.output_nr)
        if isinstance(layout, (Rows, Single)):
            found.append(Place(node, -1, grad, layout, frozenset()))
        elif isinstance(layout, WholeBatch):
            _arrive(arrived, node, root.output_nr, grad, frozenset())
    while arrived:
        node = max(arrived, key=creation_order)
        _descend(trace, node, arrived.pop(node), arrived, found)
    return found


class _Arrived:
    """What has come to a node from above: gradients of its results, and the numbers that divided them."""

    def __init__(self) -> None:
        self.grads: dict[int, Tensor] = {}
        self.divisors: frozenset[float] = frozenset()


def _descend(
    trace: Trace, node: Any, own: _Arrived, arrived: dict[Any, _Arrived], found: list[Place]
) -> None:
    """Through one node of the part in which all examples are together."""
    name, layouts, grads, divisors = (
        operation_name(type(node)),
        trace.arguments(node),
        own.grads,
        own.divisors,
    )
    apart = [k for k, layout in enumerate(layouts) if isinstance(layout, (Rows, Single))]
    grad = grads[0] if list(grads) == [0] else None
    if apart and (name in LOSSES or name.startswith(("NllLoss", "Sum", "Mean"))) and grad is not None:
        found.append(Place(node, apart[0], grad, layouts[apart[0]], divisors))  # type: ignore[arg-type]
        return
    sources = sum(child is not None for child, _ in node.next_functions)
    divides = name == "Div" and len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    bilinear = (name in BILINEAR or divides) and sources > 1
    if name in ("Dot", "Vdot") and apart and grad is not None:
        found.append(Place(node, apart[0], grad, layouts[apart[0]], divisors))  # type: ignore[arg-type]
        return
    if name not in LINEAR or bilinear or divides:
        raise UnsupportedOperation(not_linear(node.name()))
    if name == "Div" and (divisor := torch.as_tensor(saved(node, "other"))).numel() == 1:
        divisors |= {abs(float(divisor))}
    back = node(*[grads.get(k) for k in range(len(results_of(node)))])
    for k, sent in enumerate(back if isinstance(back, tuple) else (back,)):
        if k >= len(layouts) or sent is None:
            continue
        child, place = node.next_functions[k]
        if isinstance(layouts[k], WholeBatch):
            _arrive(arrived, child, place, sent, divisors)
        elif layouts[k] is not None:
            found.append(Place(child, -1, sent, layouts[k], divisors))  # type: ignore[arg-type]


def _arrive(
    arrived: dict[Any, _Arrived], node: Any, own: int, grad: Tensor, divisors: frozenset[float]
) -> None:
    there = arrived.setdefault(node, _Arrived())
    there.grads[own] = there.grads[own] + grad if own in there.grads else grad.detach()
    there.divisors |= divisors


# ────────────────────────────────────────

_MEAN, _SUM = 1, 2  # torch's numbers for a loss's reduction


@dataclass(frozen=True)
class Reading:
    """What a backward pass is a mean over: how many examples, and how much of a mean it is."""

    examples: int
    share: Share


class _Term:
    """One sum or mean over rows that the loss consists of."""

    def __init__(self, counted: frozenset[int] | None, share: Share):
        self.counted, self.share = counted, share  # None: all examples


_NOTHING = Share(0.0, 0.0)


def read_mean(
    trace: Trace, roots: Sequence[Tensor], seeds: Sequence[Tensor | None], declared: bool = False
) -> Reading:
    """For a loss that is a mean; raises on a sum, or what is none of them."""
    places = places_of(trace, roots, seeds)
    terms = _Reader(trace, True).read_all(places)
    if not terms:
        return Reading(trace.examples * trace.samples, _NOTHING)
    if len(places) > 1 and not declared and len(terms) == len(places):
        ordered = sorted(places, key=lambda place: place.is_number)  # as `read_all` gives the terms
        check_mean([place.node for place in ordered], [term.share.of_examples for term in terms])
    sets = [term.counted for term in terms]
    counted = trace.examples
    if all(known is not None for known in sets):
        counted = len(frozenset().union(*(known for known in sets if known is not None)))
    return Reading(
        (counted or trace.examples) * trace.samples,
        max((term.share for term in terms), key=lambda share: share.of_examples),
    )


def check_sum(
    trace: Trace, roots: Sequence[Tensor], seeds: Sequence[Tensor | None], declared: bool = False
) -> None:
    """For a loss that is declared to be a sum; raises on a mean."""
    places = places_of(trace, roots, seeds)
    _Reader(trace, False).read_all(places)
    if len(places) > 1 and not declared:
        check_sums([place.node for place in places])


class _Ambiguous(UnsupportedOperation):
    """Two ways to read a sum, and both would be a mean."""


class _Reader:
    """Judges one term."""

    def __init__(self, trace: Trace, mean: bool):
        self._trace, self._mean, self._examples = trace, mean, trace.examples
        self._divisors: frozenset[float] = frozenset()  # of the place that is being read
        # Sums of the weights by which the means of this loss divide, and the examples that these do not ignore.
        self._totals: tuple[tuple[float, frozenset[int]], ...] = ()

    def read_all(self, places: Sequence[Place]) -> list[_Term]:
        """Numbers of single examples that were added up one after the other are one sum."""
        ones = [place for place in places if place.is_number]
        self._totals = tuple(filter(None, map(self._total_weight, places))) if self._mean else ()
        terms = [self._read(place) for place in places if not place.is_number]
        return terms + self._read_numbers(ones, [float(place.grad.abs().sum()) for place in ones])

    def _read_numbers(self, places: Sequence[Place], sizes: Sequence[float]) -> list[_Term]:
        terms = []
        for size in {size for size in sizes if size > 0 and math.isfinite(size)}:
            alike = [place for place, own in zip(places, sizes, strict=True) if own == size]
            examples = frozenset(place.layout.example for place in alike if isinstance(place.layout, Single))
            self._divisors = frozenset().union(*(place.divisors for place in alike))
            terms.append(self._decide(alike[0].node, size, examples, len(alike), True, None))
        return terms

    def _read(self, place: Place) -> _Term:
        node, argument, grad, layout, self._divisors = place
        present = frozenset((layout.example,) if isinstance(layout, Single) else layout.examples())
        size = _size(grad, argument < 0)
        if size == 0 or not math.isfinite(size):
            return _Term(present if len(present) < self._examples else None, _NOTHING)
        name, counted = operation_name(type(node)), present if len(present) < self._examples else None
        if argument >= 0 and name.startswith("NllLoss"):
            return self._read_nll(node, layout, size, counted)
        is_mean = argument >= 0 and (name == "Mean" or (name in LOSSES and saved(node, "reduction") == _MEAN))
        if is_mean:
            size = _size(grad, True)  # of several means, each is one
            self._refuse_mean(node, present, size)
            return _Term(counted, Share(size, size))
        return self._read_sum(node, argument, layout, size, present)

    def _refuse_mean(self, node: Any, present: frozenset[int], size: float = 1.0) -> None:
        """Unless it was multiplied by their number again."""
        if not self._mean and len(present) > 1 and size < len(present) * (1 - 1e-6):
            raise UnsupportedOperation(
                f"reduction='sum' is declared, but {node.name()} takes the mean over {len(present)} examples, so the "
                "squares would be too small. Declare reduction='mean', or sum the losses."
            )

    def _read_nll(
        self, node: Any, layout: Rows | Single, size: float, counted: frozenset[int] | None
    ) -> _Term:
        target, weight = saved(node, "target"), saved(node, "weight")
        valid = target != signed(saved(node, "ignore_index"))
        axis = 0 if isinstance(layout, Single) or not layout.axis else layout.axis - 1  # the classes are gone
        kept = frozenset(layout.examples()) if isinstance(layout, Rows) else frozenset((layout.example,))
        if not bool(valid.all()):
            kept = self._examples_of(layout, axis, valid)
        if saved(node, "reduction") == _MEAN:
            self._refuse_mean(node, kept, size)
            if self._mean and weight is not None:
                kept = self._examples_of(layout, axis, _class_weights(node) != 0)
            return _Term(kept if len(kept) < self._examples else None, Share(size, size))
        return self._judge(node, layout, axis, size, _class_weights(node))

    def _read_sum(
        self, node: Any, argument: int, layout: Rows | Single, size: float, present: frozenset[int]
    ) -> _Term:
        """By the first way to read it that gives a mean; two that give different ones are none."""
        child, own = (node, 0) if argument < 0 else node.next_functions[argument]
        if isinstance(layout, Single):
            return self._decide(node, size, present, 1, True, None)
        elements, found = math.prod(results_of(child)[own].shape), []
        failure: UnsupportedOperation | None = None
        for weights in readings(self._trace, child, own, layout, _other_factor(node, argument)):
            try:
                if weights is None:
                    found.append(self._decide(node, size, present, elements, True, None))
                else:
                    found.append(self._judge(node, layout, layout.axis, size, weights))
            except _Ambiguous:
                raise
            except UnsupportedOperation as error:
                failure = failure or error
            if not self._mean:
                break  # of a sum, factors are the losses' own
        closed = [term for term in found if not term.share.open]
        if not closed and failure is not None:
            raise failure
        if len({term.counted for term in closed}) > 1:
            raise UnsupportedOperation(unreadable(node.name(), 1 / size, len(present), self._examples))
        return (closed or found)[0]

    def _judge(self, node: Any, layout: Rows | Single, axis: int, size: float, weights: Tensor) -> _Term:
        """A sum with weights, one for each element or row."""
        kept, some = self._examples_of(layout, axis, weights != 0), weights[weights != 0]
        equal = not some.numel() or bool((some == some[0]).all())
        one = abs(float(some[0])) if equal and some.numel() else 1.0
        totals = () if equal else _totals(weights, axis)
        return self._decide(node, size * one, kept, some.numel(), equal, weights.numel(), totals)

    def _decide(
        self,
        node: Any,
        size: float,
        kept: frozenset[int],
        elements: int,
        equal: bool,
        among: int | None,
        totals: tuple[float, ...] = (),
    ) -> _Term:
        """What a sum over `kept`, times `size`, is a mean over; of a weighted one, `totals` are sums of weights."""
        samples = self._trace.samples  # the loss is a mean over them, too
        elements, among = elements // samples, None if among is None else among // samples
        everything, count, divisor = self._examples, len(kept), 1 / (size * samples)
        if count == 0:
            return _Term(None, _NOTHING)
        if not self._mean:
            # A loss scale that is a power of two may be the number of examples times another one.
            if count > 1 and any(abs(count / d - 1) < 1e-4 for d in (divisor, *self._divisors)):
                self._refuse_mean(node, kept)
            return _Term(None, _NOTHING)
        # A factor beside the division, as in 0.1 * sum / M, is part of every loss.
        known = {divisor, *self._divisors}
        of_all = _fitting(known, (everything, among))
        of_kept = _fitting(known, (count, elements)) if equal else None
        number = of_all or of_kept
        totals += tuple(total for total, not_ignored in self._totals if kept == not_ignored)
        total = next((t / samples for t in totals if any(_is(d * samples, t) for d in known)), None)
        if total is not None and (number is None or count == everything):
            share = total / divisor
            return _Term(kept if count < everything else None, Share(share, share))
        if count == everything:
            # Each loss is its share of a mean, so that a sum may be divided by more than is here, but not by less.
            if number is not None:
                return _Term(None, Share(number / divisor, number / divisor))
            if equal and divisor > everything:
                return _Term(None, Share(everything / divisor, elements / divisor, True))
        elif number is not None and (of_all is None or of_kept is None):
            return _Term(None if of_kept is None else kept, Share(number / divisor, number / divisor))
        kind = _Ambiguous if number is not None else UnsupportedOperation
        raise kind(unreadable(node.name(), divisor, count, everything))

    def _total_weight(self, place: Place) -> tuple[float, frozenset[int]] | None:
        """By what a weighted mean divides, and over whom. Label smoothing divides its own part by that, too."""
        node, argument, layout = place.node, place.argument, place.layout
        if argument < 0 or not operation_name(type(node)).startswith("NllLoss"):
            return None
        if saved(node, "weight") is None or saved(node, "reduction") != _MEAN:
            return None
        valid = saved(node, "target") != signed(saved(node, "ignore_index"))
        axis = 0 if isinstance(layout, Single) or not layout.axis else layout.axis - 1
        return float(_class_weights(node).sum()), self._examples_of(layout, axis, valid)

    def _examples_of(self, layout: Rows | Single, axis: int, kept: Tensor) -> frozenset[int]:
        """The examples of which an element is kept; they are counted by dimension `axis` of `kept`."""
        if isinstance(layout, Single):
            return frozenset((layout.example,)) if bool(kept.any()) else frozenset()
        rows = kept.movedim(axis, 0).flatten(1).any(1) if kept.dim() > 1 else kept
        positions = layout.positions()
        return frozenset(positions[i] for i in rows.nonzero().flatten().tolist())


def _class_weights(node: Any) -> Tensor:
    """By what nll_loss multiplies the loss of each target: its class's weight, and zero where it is ignored."""
    target, weight = saved(node, "target"), saved(node, "weight")
    counts: Tensor = (target != signed(saved(node, "ignore_index"))).to(torch.float64)
    if weight is not None:
        counts = counts * weight.to(torch.float64)[target.clamp(min=0, max=len(weight) - 1)]
    return counts


def _totals(weights: Tensor, axis: int) -> tuple[float, ...]:
    """Sums of weights of one sign: of all elements, and of rows, where all elements of a row have the row's."""
    weights = weights.abs() if bool((weights <= 0).all()) else weights
    if bool((weights < 0).any()):
        return ()
    rows = weights.movedim(axis, 0).flatten(1) if weights.dim() > 1 else weights.unsqueeze(1)
    whole = bool((rows == rows[:, :1]).all())
    return (float(weights.sum()), float(rows[:, 0].sum())) if whole else (float(weights.sum()),)


def _other_factor(node: Any, argument: int) -> Tensor | None:
    """What a scalar product multiplies its only argument with rows by."""
    name = operation_name(type(node))
    if (
        argument < 0
        or name not in ("Dot", "Vdot")
        or all(child is not None for child, _ in node.next_functions)
    ):
        return None
    found: Tensor = saved(node, "self") if argument else saved(node, "tensor" if name == "Dot" else "other")
    return found


def _size(grad: Tensor, of_rows: bool) -> float:
    """By what a sum is multiplied: of several sums, by all of their factors; where rows arrive, by the largest."""
    if grad.numel() == 1:
        return abs(float(grad))
    if grad.numel() == 0:
        return 0.0
    return float(grad.abs().max() if of_rows else grad.abs().sum())


def _fitting(divisors: set[float], numbers: Sequence[int | None]) -> int | None:
    """The first of the numbers that something was divided by."""
    return next((n for n in numbers if n is not None and any(_fits(d, n) for d in divisors)), None)


def _is(divisor: float, total: float) -> bool:
    """Whether it is that sum of weights, but for a loss scale."""
    return total > 0 and _fits(divisor, total)


def _fits(divisor: float, number: float) -> bool:
    """Whether it is that number; a GradScaler multiplies by a power of two, not a small one."""
    if number == 0:
        return False
    ratio = number / divisor
    return abs(ratio - 1) < 1e-4 or (ratio > 200 and abs(math.log2(ratio) - round(math.log2(ratio))) < 1e-6)
