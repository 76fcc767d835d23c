"""Scores as curves: over epochs and time, and over the settings in which the rows of a recipe differ."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from credo.experiments.figures.style import (
    MARKERS,
    SCALE,
    Array,
    SeriesStyle,
    by_row,
    dashed_for_training,
    legend_below,
    looks,
    new_figure,
    over_seeds,
    tidy,
)
from credo.experiments.recipes import RECIPES
from credo.experiments.results import Result


def training_curves(results: Sequence[Result]) -> Figure | None:
    """Test solid, train dashed; with several seeds the mean, and a band from the smallest to the largest."""
    groups = {row: [r for r in group if r.log] for row, group in by_row(results).items()}
    groups = {row: group for row, group in groups.items() if group}
    if not groups:
        return None
    figure = new_figure(9.6, 3.4)
    accuracy, nll, time = figure.subplots(1, 3)
    for row, look in looks(list(groups)).items():
        draw_row(accuracy, nll, time, groups[row], look)
    tidy(accuracy, title="Accuracy", x="epoch", y="accuracy %")
    tidy(nll, title="Negative log-likelihood", x="epoch", y="nats")
    tidy(time, title="Test accuracy by time", x="seconds of training", y="accuracy %")
    for axes in (accuracy, nll):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    dashed_for_training(accuracy)
    legend_below(figure, accuracy)
    return figure


def draw_row(accuracy: Axes, nll: Axes, time: Axes, group: Sequence[Result], look: SeriesStyle) -> None:
    epochs = over_seeds(group, "epoch").mean(0)
    tested, trained = 100 * over_seeds(group, "accuracy"), 100 * over_seeds(group, "train_accuracy")
    seconds = numpy.cumsum(over_seeds(group, "seconds"), axis=1).mean(0)
    draw_band(accuracy, epochs, tested, look)
    accuracy.plot(epochs, trained.mean(0), color=look.colour, linewidth=1, linestyle="--", alpha=0.7)
    draw_band(nll, epochs, over_seeds(group, "nll"), look)
    nll.plot(
        epochs,
        over_seeds(group, "train_nll").mean(0),
        color=look.colour,
        linewidth=1,
        linestyle="--",
        alpha=0.7,
    )
    draw_band(time, seconds, tested, look)


def draw_band(axes: Axes, x: Array, values: Array, look: SeriesStyle) -> None:
    axes.plot(
        x,
        values.mean(0),
        color=look.colour,
        linewidth=1.6,
        marker=look.marker,
        markersize=4,
        markevery=max(1, len(x) // 6),
        label=look.label,
    )
    if len(values) > 1:
        axes.fill_between(x, values.min(0), values.max(0), color=look.colour, alpha=0.15, linewidth=0)


# Streams of tasks


def average_accuracy(results: Sequence[Result]) -> Figure | None:
    """Average accuracy against the number of tasks: the mean over seeds, with a band of one standard deviation."""
    groups = {row: [r for r in group if r.is_stream] for row, group in by_row(results).items()}
    groups = {row: group for row, group in groups.items() if group}
    if not groups:
        return None
    figure = new_figure(5.2, 3.6)
    axes = figure.subplots()
    for row, look in looks(list(groups)).items():
        curves = 100 * numpy.array([result.facts["average_accuracies"] for result in groups[row]])
        tasks, mean = numpy.arange(1, curves.shape[1] + 1), curves.mean(0)
        axes.plot(tasks, mean, color=look.colour, marker=look.marker, markersize=4, label=look.label)
        if len(curves) > 1:
            sd = curves.std(0, ddof=1)
            axes.fill_between(tasks, mean - sd, mean + sd, color=look.colour, alpha=0.15, linewidth=0)
        axes.set_xticks(tasks)
    recipe = RECIPES.get(results[0].recipe)
    tidy(axes, title=recipe.title if recipe else "", x="tasks learnt", y="average accuracy %")
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


# Sensitivity: how the scores follow the one setting, or two, in which the rows of a recipe differ

SYMBOLS: Final = {
    "prior_precision": "prior precision δ",
    "augmentation": "reweighting ρ",
    "mc_samples": "training samples K",
    "samples": "test samples C",
    "dropout": "dropout rate",
    "damping": "damping γ",
    "tempering": "tempering τ",
    "lr": "learning rate α",
}
PANELS: Final = (
    ("accuracy", "train_accuracy", "Accuracy", "accuracy %", 100.0),
    ("nll", "train_nll", "Negative log-likelihood", "nats", 1.0),
    ("ece", None, "Calibration error", "ECE", 1.0),
)


def numeric_settings(training: Mapping[str, Any]) -> dict[str, float]:
    """All numbers that decide a run, by name; those of the optimiser and the model stand beside the others."""
    parts: list[Mapping[str, Any]] = [
        training,
        training.get("model_options", {}),
        training.get("settings", {}),
    ]
    return {
        name: float(value)
        for part in parts
        for name, value in part.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def varying(groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """Names of the settings that differ between rows, the one with most values first."""
    settings = [numeric_settings(group[0].training) for group in groups.values()]
    shared = set.intersection(*(set(s) for s in settings)) if settings else set()
    counts = {name: len({s[name] for s in settings}) for name in shared}
    return sorted((name for name in counts if counts[name] > 1), key=lambda name: (-counts[name], name))


def sensitivity(results: Sequence[Result]) -> Figure | None:
    """Scores against the setting that varies, one line for each value of a second; None if nothing varies."""
    groups = by_row(results)
    names = varying(groups)
    if not names:
        return None
    lines = split_lines(groups, names[0], names[1] if len(names) > 1 else None)
    figure = new_figure(9.2, 3.3)
    panels = figure.subplots(1, len(PANELS))
    for axes, (test, train, title, unit, factor) in zip(panels, PANELS, strict=True):
        draw_panel(axes, lines, test, train, factor)
        tidy(axes, title=title, x=SYMBOLS.get(names[0], names[0]), y=unit)
        set_scale(axes, [x for line in lines.values() for x in line])
    dashed_for_training(panels[0])
    legend_below(figure, panels[0])
    return figure


Lines = dict[str, dict[float, list[Result]]]  # label → x → seeds


def split_lines(groups: Mapping[str, Sequence[Result]], x: str, second: str | None) -> Lines:
    lines: Lines = {}
    for group in groups.values():
        settings = numeric_settings(group[0].training)
        name = "test data" if second is None else f"{SYMBOLS.get(second, second)} = {settings[second]:.4g}"
        lines.setdefault(name, {}).setdefault(settings[x], []).extend(group)
    return {name: dict(sorted(line.items())) for name, line in lines.items()}


def draw_panel(axes: Axes, lines: Lines, test: str, train: str | None, factor: float) -> None:
    steps = matplotlib.colormaps[SCALE]
    for k, (name, line) in enumerate(lines.items()):
        colour, x = steps(0.1 + 0.6 * k / max(len(lines) - 1, 1)), list(line)
        mean, sd = scores(line, test, factor)
        axes.errorbar(x, mean, sd, color=colour, marker=MARKERS[k], markersize=5, capsize=3, label=name)
        if train is not None:
            axes.plot(x, scores(line, train, factor)[0], color=colour, linewidth=1, linestyle="--")


def scores(line: Mapping[float, Sequence[Result]], metric: str, factor: float) -> tuple[Array, Array | None]:
    """Mean at each x, and the standard deviation where every x has several seeds."""
    values = [[factor * float(r.metrics.get(metric, numpy.nan)) for r in group] for group in line.values()]
    means = numpy.array([numpy.mean(v) for v in values])
    if min(len(v) for v in values) < 2:
        return means, None
    return means, numpy.array([numpy.std(v, ddof=1) for v in values])


def set_scale(axes: Axes, x: Sequence[float]) -> None:
    """Logarithmic for values over more than an order of magnitude; ticks where the values are."""
    values = sorted(set(x))
    if values[0] > 0 and values[-1] / values[0] > 9:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
