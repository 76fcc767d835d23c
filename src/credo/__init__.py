"""credo: deep networks that know how sure they are, by changing the optimiser and nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credo import errors, kernels, metrics, optim
from credo.calibration import Calibration, calibrate
from credo.curvature.capture import capture, squared_gradients
from credo.curvature.kronecker import kronecker_factors
from credo.curvature.rule import Operation, PerExampleGradient, Stacked
from credo.curvature.rules import register_rule
from credo.metrics import evaluate
from credo.optim import OGN, VOGN, TemperingSchedule
from credo.posterior import (
    DiagonalPosterior,
    KroneckerPosterior,
    LowRankPosterior,
    Posterior,
    elbo,
    load_posterior,
)
from credo.predict import DropoutPosterior, Ensemble, predict

if TYPE_CHECKING:
    from credo import continual, data, distributed, experiments, integrations, models, sklearn
    from credo.baselines import SWAG, laplace, refresh_batch_norm
    from credo.experiments.tuning import tune
    from credo.optim import IVON, KFAC, BayesByBackprop, NoisyKFAC

__version__ = "0.2.0"
Contribution = PerExampleGradient  # its name in the first releases
# Imported when they are first asked for: importing credo should cost little.
_LATER = (
    *("baselines", "cli", "continual", "curvature", "data", "distributed", "experiments", "integrations"),
    *("models", "sklearn"),
)
_BASELINES = ("SWAG", "laplace", "refresh_batch_norm")

__all__ = [
    "IVON",
    "KFAC",
    "OGN",
    "SWAG",
    "VOGN",
    "BayesByBackprop",
    "Calibration",
    "Contribution",
    "DiagonalPosterior",
    "DropoutPosterior",
    "Ensemble",
    "KroneckerPosterior",
    "LowRankPosterior",
    "NoisyKFAC",
    "Operation",
    "PerExampleGradient",
    "Posterior",
    "Stacked",
    "TemperingSchedule",
    "calibrate",
    "capture",
    "continual",
    "data",
    "distributed",
    "elbo",
    "errors",
    "evaluate",
    "experiments",
    "integrations",
    "kernels",
    "kronecker_factors",
    "laplace",
    "load_posterior",
    "metrics",
    "models",
    "optim",
    "predict",
    "refresh_batch_norm",
    "register_rule",
    "sklearn",
    "squared_gradients",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"credo.{name}")
    if name == "tune":
        return import_module("credo.experiments.tuning").tune
    if name in _BASELINES:
        return getattr(import_module("credo.baselines"), name)
    if name in optim.LATER:
        return getattr(optim, name)
    raise AttributeError(f"module 'credo' has no attribute {name!r}")


def __dir__() -> list[str]:
    own = globals().keys() - {"Any", "TYPE_CHECKING", "import_module"}
    return sorted({*own, *_LATER, *_BASELINES, *optim.LATER, "tune"})
