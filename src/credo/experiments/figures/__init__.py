"""The pictures: functions from results to a matplotlib `Figure`, without pyplot and its global state.

    figure = figures.calibration_curves(results)
    figures.save(figure, folder / "calibration")       # calibration.png and calibration.svg
    figures.draw("entropy_histograms", results)        # by the name a recipe gives; None if the results lack it

Names: training_curves, calibration_curves, reliability, entropy_histograms, sensitivity, uncertain_inputs, overview.
Results of several seeds share a colour and are averaged where an average means something.
"""

from matplotlib.figure import Figure

from credo.experiments.figures.calibration import calibration_curves, reliability
from credo.experiments.figures.draw import CAPTIONS, draw
from credo.experiments.figures.entropy import entropy_histograms
from credo.experiments.figures.files import save, svg
from credo.experiments.figures.inputs import uncertain_inputs
from credo.experiments.figures.overview import overview
from credo.experiments.figures.sensitivity import sensitivity
from credo.experiments.figures.training import training_curves

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
    "uncertain_inputs",
    "overview",
]
