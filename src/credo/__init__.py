"""credo: deep networks that know how sure they are, by changing the optimiser and nothing else."""

from credo import continual, errors, kernels, metrics
from credo.curvature.capture import capture, squared_gradients
from credo.curvature.contribution import Contribution, Stacked
from credo.curvature.kronecker import kronecker_factors
from credo.curvature.operation import Operation
from credo.curvature.rules import register_rule
from credo.metrics import evaluate
from credo.optim import IVON, KFAC, OGN, VOGN, BayesByBackprop, NoisyKFAC, TemperingSchedule
from credo.posterior import DiagonalPosterior, KroneckerPosterior, Posterior, elbo, load_posterior
from credo.predict import DropoutPosterior, Ensemble, predict

__version__ = "0.1.0"

__all__ = [
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "BayesByBackprop",
    "Contribution",
    "DiagonalPosterior",
    "DropoutPosterior",
    "Ensemble",
    "KroneckerPosterior",
    "NoisyKFAC",
    "Operation",
    "Posterior",
    "Stacked",
    "TemperingSchedule",
    "capture",
    "continual",
    "elbo",
    "errors",
    "evaluate",
    "kernels",
    "kronecker_factors",
    "load_posterior",
    "metrics",
    "predict",
    "register_rule",
    "squared_gradients",
]
