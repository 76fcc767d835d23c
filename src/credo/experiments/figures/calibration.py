"""Calibration: the accuracy among predictions of the same confidence, against that confidence."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credo.experiments.figures.grouping import Array, by_row
from credo.experiments.figures.style import INK, SOFT, Look, looks, new_figure, tidy
from credo.experiments.results import Result

FEW: Final = 10  # inputs in a bin of all seeds together: below this its accuracy is mostly chance


class Curve(NamedTuple):
    """One entry a bin."""

    confidence: Array
    accuracy: Array
    examples: Array


def pooled(results: Sequence[Result]) -> Curve | None:
    """The curve of all seeds' predictions together: n = Σnₛ, and means weighted by nₛ. None without curves."""
    curves = [curve for curve in (result.facts["curve"] for result in results) if curve]
    if not curves:
        return None
    examples = numpy.array([curve["examples"] for curve in curves], dtype=float)
    total = examples.sum(0)

    def mean(name: str) -> Array:
        values = numpy.array([curve[name] for curve in curves], dtype=float)  # None becomes NaN
        sums = (numpy.nan_to_num(values) * examples).sum(0)
        found: Array = numpy.divide(sums, total, out=numpy.full_like(total, numpy.nan), where=total > 0)
        return found

    return Curve(mean("confidence"), mean("accuracy"), total)


def curves_of(results: Sequence[Result]) -> dict[str, Curve]:
    found = {row: pooled(group) for row, group in by_row(results).items()}
    return {row: curve for row, curve in found.items() if curve is not None}


def calibration_curves(results: Sequence[Result]) -> Figure | None:
    """One curve a row, the diagonal behind them."""
    curves = curves_of(results)
    if not curves:
        return None
    figure = new_figure(4.6, 4.4)
    draw_calibration(figure.subplots(), curves)
    return figure


def draw_calibration(axes: Axes, curves: dict[str, Curve]) -> None:
    diagonal(axes)
    for row, look in looks(list(curves)).items():
        curve = curves[row]
        shown = curve.examples >= FEW
        axes.plot(
            curve.confidence[shown],
            curve.accuracy[shown],
            color=look.colour,
            marker=look.marker,
            markersize=4,
            linewidth=1.6,
            label=look.label,
            clip_on=False,
        )
    tidy(axes, x="confidence", y="accuracy", title="Calibration")
    unit_square(axes)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def reliability(results: Sequence[Result]) -> Figure | None:
    """One panel a row: accuracy by confidence as bars, and beneath them how many predictions each bin has."""
    curves = curves_of(results)
    if not curves:
        return None
    figure = new_figure(max(2.5 * len(curves), 3.2), 3.5)
    grid = figure.subplots(2, len(curves), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    for k, (row, look) in enumerate(looks(list(curves)).items()):
        draw_reliability(grid[0, k], grid[1, k], curves[row], look)
    grid[0, 0].set_ylabel("accuracy", fontsize=9, color=INK)
    grid[1, 0].set_ylabel("share", fontsize=9, color=INK)
    return figure


def draw_reliability(above: Axes, below: Axes, curve: Curve, look: Look) -> None:
    bins = len(curve.examples)
    centres, width = (numpy.arange(bins) + 0.5) / bins, 1 / bins
    share = curve.examples / curve.examples.sum()
    gap = numpy.nansum(share * numpy.abs(curve.accuracy - curve.confidence))
    diagonal(above)
    above.bar(centres, curve.accuracy, width, color=look.colour, alpha=0.75, edgecolor="white", linewidth=0.5)
    below.bar(centres, share, width, color=look.colour, alpha=0.75, edgecolor="white", linewidth=0.5)
    tidy(above, title=look.label)
    tidy(below, x="confidence")
    unit_square(above)
    above.text(0.04, 0.94, f"ECE {gap:.3f}", fontsize=8, color=INK, va="top", transform=above.transAxes)


def diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle="--", zorder=2.5)


def unit_square(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
