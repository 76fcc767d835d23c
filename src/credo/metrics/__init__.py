"""How good predictions are: pure functions of (probs, targets), in float64 inside, numbers outside.

`probs` is (N, C), rows that sum to one; `targets` is (N,), class indices. Those of regression take (mean, variance,
targets), of any shape. `evaluate` takes what `predict` returns, of every task and layout. What is undefined for good
reasons is NaN (the AUROC of a model without errors) or infinite (the NLL of a true class given probability 0).
What can only be a mistake (logits, no rows, a class that does not exist) is an error that says so.
"""

from credo.metrics.calibration import (
    CalibrationCurve,
    RunningScores,
    adaptive_ece,
    calibration_curve,
    classwise_ece,
    ece,
)
from credo.metrics.continual import (
    average_accuracies,
    average_accuracy,
    backward_transfer,
    forgetting,
)
from credo.metrics.evaluate import evaluate
from credo.metrics.ranking import RiskCoverage, aurc, auroc, fpr_at_tpr, ood_auroc, risk_coverage
from credo.metrics.regression import coverage, crps, gaussian_nll, rmse
from credo.metrics.scores import accuracy, brier, entropy, nll

__all__ = [
    "accuracy",
    "nll",
    "brier",
    "entropy",
    "ece",
    "adaptive_ece",
    "classwise_ece",
    "calibration_curve",
    "CalibrationCurve",
    "auroc",
    "aurc",
    "risk_coverage",
    "RiskCoverage",
    "ood_auroc",
    "fpr_at_tpr",
    "rmse",
    "gaussian_nll",
    "crps",
    "coverage",
    "average_accuracy",
    "average_accuracies",
    "backward_transfer",
    "forgetting",
    "RunningScores",
    "evaluate",
]
