"""The inputs a method is least sure of: pictures with what they are and what it said; and the overview."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray
from torch import Tensor

from credo.experiments.build import RunData, run_data
from credo.experiments.figures.calibration import (
    Curve,
    Entropies,
    curves_of,
    draw_calibration,
    draw_histogram,
    entropies_of,
)
from credo.experiments.figures.style import INK, SOFT, by_row, looks, new_figure, tidy
from credo.experiments.recipe import Training
from credo.experiments.results import Result

SHOWN: Final = 10


def data_of(result: Result, data_root: Path | None) -> RunData | None:
    """The data a run was tested on, in the order of its predictions; None for data that are a user's function."""
    fields = dict(result.training)
    if "." in str(fields["data"]):
        return None
    fields["held_out_classes"] = tuple(fields.get("held_out_classes", ()))
    return run_data(Training(**fields), data_root)


def uncertain_inputs(results: Sequence[Result], data: RunData) -> Figure | None:
    """For every row the test inputs of highest entropy, first seed; None if the inputs are no images."""
    groups = {row: group[0] for row, group in by_row(results).items()}
    figure = new_figure(1.0 * SHOWN + 0.9, 1.35 * len(groups) + 0.4)
    grid = figure.subplots(len(groups), SHOWN, squeeze=False)
    for k, (row, look) in enumerate(looks(list(groups)).items()):
        if not draw_inputs(list(grid[k]), groups[row], data):
            return None
        grid[k, 0].set_ylabel(look.label, fontsize=9, color=look.colour, fontweight="bold")
    return figure


def draw_inputs(panels: Sequence[Axes], result: Result, data: RunData) -> bool:
    """True if the inputs are images and were drawn."""
    predictions = result.predictions()
    order = predictions["test.entropy"].argsort(descending=True)[: len(panels)]
    inputs, targets = data.test.gather(order)
    images = pictures_of(inputs)
    if images is None:
        return False
    guesses = predictions["test.probs"][order].max(1)
    for axes, image, target, probability, guess in zip(panels, images, targets, *guesses, strict=False):
        draw_image(axes, image)
        said, true = (name(data.classes, int(label)) for label in (guess, target))
        right = said == true
        axes.set_title(
            f"{said}? {100 * float(probability):.0f} %", fontsize=8, color=INK if right else "#B22222"
        )
        axes.set_xlabel(true, fontsize=8, color=SOFT)
    for axes in panels[len(order) :]:
        axes.set_visible(False)
    return True


def name(classes: Sequence[str], label: int) -> str:
    return classes[label] if classes else str(label)


def pictures_of(inputs: Tensor) -> NDArray[numpy.float64] | None:
    """(n, H, W, channels) in [0, 1]; square vectors are images of one channel; None if these are none.

    One channel is stretched to its largest value, since not all sets count to 255 (scikit-learn's digits to 16).
    """
    if inputs.ndim == 2:
        side = round(inputs.shape[1] ** 0.5)
        if side < 4 or side * side != inputs.shape[1]:
            return None
        inputs = inputs.view(-1, 1, side, side)
    if inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    photographs = inputs.dtype == torch.uint8 and inputs.shape[1] == 3
    values = inputs.double() / (255 if photographs else max(float(inputs.max()), 1e-12))
    found: NDArray[numpy.float64] = values.clamp(0, 1).permute(0, 2, 3, 1).numpy()
    return found


def draw_image(axes: Axes, image: NDArray[numpy.float64]) -> None:
    if image.shape[-1] == 1:
        axes.imshow(image[..., 0], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    else:
        axes.imshow(image, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#d5dae0")


# One picture for all: calibration, entropy on familiar and unfamiliar inputs, the least certain inputs


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
