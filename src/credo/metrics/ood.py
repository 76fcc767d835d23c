"""Does the model doubt what it has never seen? Familiar inputs against others, by top probability.

In-distribution is the positive class, as in the literature: a good model is surer there.
"""

import math

from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.metrics.checks import check_probs
from credo.metrics.ranking import roc_area


def ood_auroc(probs_in: Tensor, probs_out: Tensor) -> float:
    """P(top probability in-distribution > out of it), ties counting half; 0.5 is chance."""
    return roc_area(*confidences(probs_in, probs_out))


def fpr_at_tpr(probs_in: Tensor, probs_out: Tensor, tpr: float = 0.95) -> float:
    """Share of unfamiliar inputs at or above the highest threshold that keeps `tpr` of the familiar ones."""
    confidence_in, confidence_out = confidences(probs_in, probs_out)
    wanted = check_rate(tpr) * len(confidence_in)
    kept = max(1, math.ceil(wanted - 1e-9 * len(confidence_in)))  # 0.55·100 is 55.00000000000001
    threshold = confidence_in.sort(descending=True).values[kept - 1]
    return (confidence_out >= threshold).double().mean().item()


def confidences(probs_in: Tensor, probs_out: Tensor) -> tuple[Tensor, Tensor]:
    probs_in, probs_out = check_probs(probs_in, "probs_in"), check_probs(probs_out, "probs_out")
    if probs_in.shape[1] != probs_out.shape[1]:
        raise InvalidValue(
            f"probs_in has {probs_in.shape[1]} classes and probs_out {probs_out.shape[1]}; "
            "give the predictions of one model for both"
        )
    return probs_in.amax(1), probs_out.amax(1).to(probs_in)


def check_rate(tpr: object) -> float:
    if isinstance(tpr, bool) or not isinstance(tpr, (int, float)):
        raise InvalidType(f"tpr={tpr!r} is a {type(tpr).__name__}; give a number, 0 < tpr <= 1")
    if not 0 < tpr <= 1:
        raise InvalidValue(f"tpr={tpr} is outside 0 < tpr <= 1; 0.95 is the usual choice")
    return float(tpr)
