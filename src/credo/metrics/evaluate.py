"""The scores people report, in one call."""

from typing import Protocol

from torch import Tensor

from credo.metrics.calibration import ece
from credo.metrics.ood import fpr_at_tpr, ood_auroc
from credo.metrics.ranking import auroc
from credo.metrics.scores import accuracy, brier, nll


class HasProbs(Protocol):
    """What `credo.predict` returns for a classifier, and anything else with probabilities."""

    @property
    def probs(self) -> Tensor: ...


def evaluate(prediction: HasProbs, targets: Tensor, ood: HasProbs | None = None) -> dict[str, float]:
    """Accuracy, NLL, Brier score, ECE and AUROC.

    With `ood`, a prediction for unfamiliar inputs, also how well the top probability tells them apart:
    `ood_auroc`, and `ood_fpr95`, the FPR at 95 % TPR.
    """
    functions = {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece, "auroc": auroc}
    scores = {name: function(prediction.probs, targets) for name, function in functions.items()}
    if ood is not None:
        scores["ood_auroc"] = ood_auroc(prediction.probs, ood.probs)
        scores["ood_fpr95"] = fpr_at_tpr(prediction.probs, ood.probs, tpr=0.95)
    return scores
