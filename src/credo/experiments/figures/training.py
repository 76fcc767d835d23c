"""Training curves: test accuracy and NLL by epoch, and accuracy by time."""

from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from credo.experiments.figures.grouping import Array, by_row, over_seeds
from credo.experiments.figures.style import Look, dashed_for_training, legend_below, looks, new_figure, tidy
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


def draw_row(accuracy: Axes, nll: Axes, time: Axes, group: Sequence[Result], look: Look) -> None:
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


def draw_band(axes: Axes, x: Array, values: Array, look: Look) -> None:
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
