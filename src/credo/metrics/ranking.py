"""Are the wrong answers the unsure ones? Everything here depends on the order of the confidences only.

Unfamiliar inputs: in-distribution is the positive class, as in the literature; a good model is surer there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.metrics.calibration import top_class
from credo.metrics.scores import check_probs


class RiskCoverage(NamedTuple):
    """If only the k surest of N are answered: `coverage` is k/N, `risk` the share of errors among them."""

    coverage: Tensor
    risk: Tensor


def auroc(probs: Tensor, targets: Tensor) -> float:
    """P(a correct answer is surer than a wrong one), ties counting half; 0.5 is chance.

    The area under the ROC curve of correct against wrong, scored by the top probability.
    NaN if all answers are correct, or all wrong: there is no pair to compare.
    """
    confidence, correct = top_class(probs, targets)
    return roc_area(confidence[correct], confidence[~correct])


def aurc(probs: Tensor, targets: Tensor) -> float:
    """Area under the risk–coverage curve, 1/N Σₖ riskₖ; smaller is better."""
    return risk_coverage(probs, targets).risk.mean().item()


def risk_coverage(probs: Tensor, targets: Tensor) -> RiskCoverage:
    """The curve, surest first. Among equal confidences errors are spread evenly, as a random order would."""
    confidence, correct = top_class(probs, targets)
    confidence, order = confidence.sort(descending=True)
    answered = torch.arange(1, len(confidence) + 1, dtype=torch.float64, device=confidence.device)
    errors = mean_within_ties(confidence, (~correct[order]).double())
    return RiskCoverage(answered / len(confidence), errors.cumsum(0) / answered)


def mean_within_ties(ordered: Tensor, values: Tensor) -> Tensor:
    group = (ordered.diff() != 0).long().cumsum(0)
    group = torch.cat([group.new_zeros(1), group])
    sizes = group.bincount()
    totals = values.new_zeros(len(sizes)).index_add_(0, group, values)
    return (totals / sizes)[group]


def roc_area(positive: Tensor, negative: Tensor) -> float:
    """The Mann–Whitney statistic, P(positive > negative) + ½P(equal), without the pairs: O(N log N)."""
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    negative = negative.sort().values
    below = torch.searchsorted(negative, positive, right=False).sum()
    below_or_equal = torch.searchsorted(negative, positive, right=True).sum()
    return ((below + below_or_equal).double() / (2 * len(positive) * len(negative))).item()


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
