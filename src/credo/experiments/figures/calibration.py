"""Calibration: accuracy against confidence, and the predictive entropy on familiar and unfamiliar inputs."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from credo.experiments.figures.style import (
    FAMILIAR,
    INK,
    SOFT,
    UNFAMILIAR,
    Array,
    SeriesStyle,
    by_row,
    legend_below,
    looks,
    new_figure,
    tidy,
)
from credo.experiments.names import label, set_label
from credo.experiments.results import Result

FEW: Final = 10  # inputs in a bin of all seeds together: below this its accuracy is mostly chance


class Curve(NamedTuple):
    """One entry a bin."""

    confidence: Array
    accuracy: Array
    examples: Array


def pooled(results: Sequence[Result]) -> Curve | None:
    """The curve of all seeds' predictions together: n = Σnₛ, and means weighted by nₛ. None without curves."""
    curves = [curve for curve in (result.facts.get("curve") for result in results) if curve]
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


def draw_reliability(above: Axes, below: Axes, curve: Curve, look: SeriesStyle) -> None:
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


# Histograms of the predictive entropy, familiar inputs against unfamiliar ones

BINS: Final = 30


class Entropies(NamedTuple):
    """In nats, of all seeds together; `classes` sets the largest possible, log C."""

    familiar: Array
    unfamiliar: dict[str, Array]
    classes: int


def entropies_of(results: Sequence[Result]) -> Entropies | None:
    """None where a run kept no predictions on unfamiliar data."""
    kept = [result.predictions() for result in results]
    names = unfamiliar_sets(kept[0], list(results[0].training.get("ood", ())))
    if not names:
        return None
    return Entropies(
        joined(kept, "test.entropy"),
        {name: joined(kept, f"ood.{name}.entropy") for name in names},
        kept[0]["test.probs"].shape[1],
    )


def unfamiliar_sets(predictions: Mapping[str, Tensor], order: list[str]) -> list[str]:
    """Names of the unfamiliar data: classes held out first, then as the recipe lists them."""
    keys = [key for key in predictions if key.startswith("ood.") and key.endswith(".entropy")]
    names = [key.removeprefix("ood.").removesuffix(".entropy") for key in keys]
    return sorted(names, key=lambda name: (order.index(name) if name in order else -1, name))


def joined(kept: Sequence[Mapping[str, Tensor]], key: str) -> Array:
    return numpy.concatenate([predictions[key].double().numpy() for predictions in kept])


def entropy_histograms(results: Sequence[Result]) -> Figure | None:
    """A panel for each row and unfamiliar data set; rows side by side where there is a single set."""
    groups = by_row(results)
    found = {row: entropies_of(group) for row, group in groups.items()}
    shown = {row: entropies for row, entropies in found.items() if entropies is not None}
    if not shown:
        return None
    names = list(next(iter(shown.values())).unfamiliar)
    across = len(names) == 1
    down, right = (1, len(shown)) if across else (len(shown), len(names))
    figure = new_figure(max(2.9 * right, 3.6), 2.3 * down + 0.7)
    grid = figure.subplots(down, right, squeeze=False, sharex=True, sharey=True if across else "row")
    panels = grid.T if across else grid
    for k, row in enumerate(shown):
        for axes, name in zip(panels[k], names, strict=True):
            draw_histogram(axes, shown[row], name)
            tidy(axes, title=f"{label(row)}: {set_label(name)}\n{detection(groups[row], name)}")
    for axes in grid[-1]:
        axes.set_xlabel("predictive entropy (nats)", fontsize=9, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("density", fontsize=9, color=INK)
    legend_below(figure, grid[0, 0])
    return figure


def detection(results: Sequence[Result], name: str) -> str:
    """How well the two are told apart, mean over the seeds."""
    auroc, fpr = (
        numpy.mean([r.metrics.get(f"{m}.{name}", math.nan) for r in results])
        for m in ("ood_auroc", "ood_fpr95")
    )
    return f"AUROC {auroc:.3f}, FPR95 {fpr:.3f}"


def draw_histogram(axes: Axes, entropies: Entropies, name: str) -> None:
    """Both densities over 0 … log C, their means as lines."""
    edges = numpy.linspace(0, math.log(entropies.classes), BINS + 1).tolist()
    shown = {
        "familiar": (entropies.familiar, FAMILIAR),
        "unfamiliar": (entropies.unfamiliar[name], UNFAMILIAR),
    }
    for kind, (values, colour) in shown.items():
        inside = numpy.clip(values, edges[0], edges[-1])  # rounding may reach past log C
        axes.hist(inside, edges, density=True, color=colour, alpha=0.3, label=kind)
        axes.hist(inside, edges, density=True, color=colour, histtype="step", linewidth=1.2)
        axes.axvline(float(values.mean()), color=colour, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_xlim(edges[0], edges[-1])
