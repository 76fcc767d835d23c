"""One picture for the whole story: calibration, entropy on familiar and unfamiliar inputs, the least certain inputs."""

from collections.abc import Sequence

from matplotlib.figure import Figure, SubFigure

from credo.experiments.examples import RunData
from credo.experiments.figures.calibration import Curve, curves_of, draw_calibration
from credo.experiments.figures.entropy import Entropies, draw_histogram, entropies_of
from credo.experiments.figures.grouping import by_row
from credo.experiments.figures.inputs import draw_inputs
from credo.experiments.figures.style import INK, looks, new_figure, tidy
from credo.experiments.results import Result


def overview(results: Sequence[Result], data: RunData, inputs_of: str = "vogn") -> Figure | None:
    """Calibration left, a histogram a method right, below the inputs of which the row `inputs_of` is least sure."""
    groups = by_row(results)
    curves, found = curves_of(results), {row: entropies_of(group) for row, group in groups.items()}
    histograms = {row: entropies for row, entropies in found.items() if entropies is not None}
    if not curves or not histograms:
        return None
    shown = groups.get(inputs_of, next(iter(groups.values())))[0]
    figure = new_figure(10.4, 5.6)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 1.25)).flat
    draw_above(above, curves, histograms)
    draw_below(below, shown, data)
    return figure


def draw_above(figure: SubFigure, curves: dict[str, Curve], histograms: dict[str, Entropies]) -> None:
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 0.85 * len(histograms))).flat
    draw_calibration(left.subplots(), curves)
    panels = right.subplots(1, len(histograms), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (row, look) in zip(panels, looks(list(histograms)).items(), strict=True):
        name = next(iter(histograms[row].unfamiliar))
        draw_histogram(axes, histograms[row], name)
        tidy(axes, title=look.label, x="predictive entropy (nats)")
    panels[0].set_ylabel("density", fontsize=9, color=INK)
    panels[-1].legend(fontsize=8, frameon=False, loc="upper right")


def draw_below(figure: SubFigure, result: Result, data: RunData) -> None:
    look = looks([result.row])[result.row]
    panels = list(figure.subplots(1, 10))
    figure.suptitle(
        f"The test inputs {look.label} is least sure of: what it says, how sure, and what they are",
        fontsize=10,
        color=INK,
        x=0.01,
        ha="left",
    )
    if not draw_inputs(panels, result, data):
        figure.set_visible(False)
