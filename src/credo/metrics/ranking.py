"""Are the wrong answers the unsure ones? Everything here depends on the order of the confidences only."""

from typing import NamedTuple

import torch
from torch import Tensor

from credo.metrics.calibration import top_class


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
