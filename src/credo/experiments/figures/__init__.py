"""The pictures: functions from results to a matplotlib `Figure`, without pyplot and its global state.

    figure = figures.calibration_curves(results)
    figures.save(figure, folder / "calibration")       # calibration.png and calibration.svg
    figures.draw("entropy_histograms", results)        # by the name a recipe gives; None if the results lack it

Names: training_curves, calibration_curves, reliability, entropy_histograms, sensitivity, uncertain_inputs, overview;
average_accuracy of streams of tasks.
Results of several seeds share a colour and are averaged where an average means something.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from credo.errors import CredoError
from credo.experiments.build import RunData
from credo.experiments.figures.calibration import FEW, calibration_curves, entropy_histograms, reliability
from credo.experiments.figures.curves import average_accuracy, sensitivity, training_curves
from credo.experiments.figures.least_certain import data_of, overview, uncertain_inputs
from credo.experiments.figures.style import save, svg
from credo.experiments.names import known
from credo.experiments.results import Result

__all__ = [
    "Figure",
    "CAPTIONS",
    "draw",
    "save",
    "svg",
    "training_curves",
    "calibration_curves",
    "reliability",
    "entropy_histograms",
    "sensitivity",
    "average_accuracy",
    "uncertain_inputs",
    "overview",
]

FROM_RESULTS: Final[dict[str, Callable[[Sequence[Result]], Figure | None]]] = {
    "training_curves": training_curves,
    "calibration_curves": calibration_curves,
    "reliability": reliability,
    "entropy_histograms": entropy_histograms,
    "sensitivity": sensitivity,
    "average_accuracy": average_accuracy,
}
FROM_DATA: Final[dict[str, Callable[[Sequence[Result], RunData], Figure | None]]] = {
    "uncertain_inputs": uncertain_inputs,
    "overview": overview,
}

CAPTIONS: Final = {
    "training_curves": (
        "Training curves",
        "Solid: test data; dashed: training data as they went by. With several seeds the mean, and a band from the "
        "smallest to the largest.",
    ),
    "calibration_curves": (
        "Calibration curves",
        "Accuracy against confidence in 20 bins, all seeds together; on the dashed diagonal a method is right as "
        f"often as it says. Bins of fewer than {FEW} predictions are not drawn.",
    ),
    "reliability": (
        "Reliability by method",
        "Above: accuracy in each bin of confidence, against the diagonal. Below: the share of predictions in the bin.",
    ),
    "entropy_histograms": (
        "Predictive entropy",
        "Densities on familiar and unfamiliar inputs, all seeds together; vertical lines are means. A good method is "
        "low on the first and high on the second.",
    ),
    "sensitivity": (
        "Sensitivity",
        "Solid: test data; dashed: training data. Bars are one standard deviation.",
    ),
    "average_accuracy": (
        "Average accuracy",
        "Over the tasks learned so far, after each of them. With several seeds the mean, and a band of one standard "
        "deviation.",
    ),
    "uncertain_inputs": (
        "The most uncertain test inputs",
        "Above each input the prediction and its probability, red if wrong; below, what it is.",
    ),
    "overview": (
        "Overview",
        "Calibration, predictive entropy on familiar and unfamiliar inputs, and the most uncertain test inputs.",
    ),
}


def draw(kind: str, results: Sequence[Result], *, data_root: Path | str | None = None) -> Figure | None:
    """The figure of that name for results of one recipe and size; None where they lack what it shows.

    Figures of inputs read the data again; without the data they are None too.
    """
    known("figure", kind, CAPTIONS)
    if not results:
        return None
    if kind in FROM_RESULTS:
        return FROM_RESULTS[kind](results)
    data = available_data(results[0], None if data_root is None else Path(data_root))
    return None if data is None else FROM_DATA[kind](results, data)


def available_data(result: Result, root: Path | None) -> RunData | None:
    try:
        return data_of(result, root)
    except (CredoError, OSError):  # moved or damaged since: the report should not fail for a picture
        return None
