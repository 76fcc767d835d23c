"""Sensitivity: how the scores follow the one setting, or two, in which the rows of a recipe differ."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credo.experiments.figures.grouping import Array, by_row
from credo.experiments.figures.style import (
    MARKERS,
    SCALE,
    dashed_for_training,
    legend_below,
    new_figure,
    tidy,
)
from credo.experiments.results import Result

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
