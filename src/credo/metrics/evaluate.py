"""The scores people report, in one call."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from credo.distributed import gather, world_asked_for
from credo.metrics.calibration import ece
from credo.metrics.ood import fpr_at_tpr, ood_auroc
from credo.metrics.ranking import auroc
from credo.metrics.scores import accuracy, brier, nll


class HasProbs(Protocol):
    """What `credo.predict` returns for a classifier, and anything else with probabilities."""

    @property
    def probs(self) -> Tensor: ...


def evaluate(
    prediction: HasProbs, targets: Tensor, ood: HasProbs | None = None, *, distributed: bool = False
) -> dict[str, float]:
    """Accuracy, NLL, Brier score, ECE and AUROC.

    With `ood`, a prediction for unfamiliar inputs, also how well the top probability tells them apart:
    `ood_auroc`, and `ood_fpr95`, the FPR at 95 % TPR.

    With `distributed`, `prediction`, `targets` and `ood` are this rank's part, of any size, and the scores those of all
    ranks' examples together, the same on every rank. What `predict(distributed=True)` returns is whole already.
    """
    if distributed:
        return evaluate(*_of_all_ranks(prediction, targets, ood))
    functions = {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece, "auroc": auroc}
    scores = {name: function(prediction.probs, targets) for name, function in functions.items()}
    if ood is not None:
        scores["ood_auroc"] = ood_auroc(prediction.probs, ood.probs)
        scores["ood_fpr95"] = fpr_at_tpr(prediction.probs, ood.probs, tpr=0.95)
    return scores


@dataclass(frozen=True)
class Probs:
    """All ranks' probabilities, in the order of ranks."""

    probs: Tensor


def _of_all_ranks(
    prediction: HasProbs, targets: Tensor, ood: HasProbs | None
) -> tuple[Probs, Tensor, Probs | None]:
    own = [prediction.probs, targets, *([] if ood is None else [ood.probs])]
    columns = [torch.cat(column) for column in zip(*gather(world_asked_for(), own), strict=True)]
    return Probs(columns[0]), columns[1], Probs(columns[2]) if ood is not None else None
