"""Does 80 % sure mean right 80 times in 100? Expected calibration errors and the curve behind them.

    ECE = Σ_b n_b/N · |accuracy_b − confidence_b|

over bins b of the confidence, which is the probability of the top class.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from credo.errors import CallOrderError, InvalidValue
from credo.metrics.scores import check_bins, check_pair, each_brier, each_correct, each_nll


class CalibrationCurve(NamedTuple):
    """One entry per bin, also for empty bins: 0 `examples`, and NaN for `confidence` and `accuracy`."""

    confidence: Tensor
    accuracy: Tensor
    examples: Tensor


class BinSums(NamedTuple):
    """Sums per bin, (bins,) each: they add up over batches, which means do not."""

    examples: Tensor
    confidence: Tensor
    correct: Tensor

    def error(self) -> float:
        """Σ_b |Σ correct − Σ confidence| / N, the ECE without dividing by n_b and multiplying again."""
        return ((self.correct - self.confidence).abs().sum() / self.examples.sum()).item()


def ece(probs: Tensor, targets: Tensor, bins: int = 20) -> float:
    """Expected calibration error over equal-width bins, closed on the right: (0, 1/20], (1/20, 2/20], …"""
    confidence, correct = top_class(probs, targets)
    return equal_width_sums(confidence, correct, check_bins(bins)).error()


def adaptive_ece(probs: Tensor, targets: Tensor, bins: int = 20) -> float:
    """The same over bins of equal mass, whose edges are quantiles of the confidence.

    Equal confidences share a bin, so the order of the examples does not matter and bins may be fewer.
    """
    confidence, correct = top_class(probs, targets)
    examples, bins = len(confidence), check_bins(bins)
    last = [-(-examples * b // bins) - 1 for b in range(1, bins)]  # of each bin but the last, by rank
    edges = confidence.sort().values[torch.tensor(last, dtype=torch.long, device=confidence.device)]
    return sums(torch.bucketize(confidence, edges), confidence, correct, bins).error()


def classwise_ece(probs: Tensor, targets: Tensor, bins: int = 20) -> float:
    """Mean over the classes k of the ECE of pₖ for [y=k]: every class must be right, not only the top one."""
    probs, targets = check_pair(probs, targets)
    bins, columns = check_bins(bins), probs.t().contiguous()
    errors = [equal_width_sums(p, targets == k, bins).error() for k, p in enumerate(columns)]
    return sum(errors) / len(errors)


def calibration_curve(probs: Tensor, targets: Tensor, bins: int = 20) -> CalibrationCurve:
    """Accuracy against confidence per equal-width bin; on the diagonal the model is calibrated."""
    confidence, correct = top_class(probs, targets)
    total = equal_width_sums(confidence, correct, check_bins(bins))
    return CalibrationCurve(
        total.confidence / total.examples, total.correct / total.examples, total.examples.to(torch.long)
    )


def top_class(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of the top class, and whether it is the true one."""
    probs, targets = check_pair(probs, targets)
    return probs.amax(1), each_correct(probs, targets)


def equal_width_sums(confidence: Tensor, correct: Tensor, bins: int) -> BinSums:
    # in the dtype of the confidence: 0.05 in float32 must meet the edge 0.05 in float32
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence)
    return sums(torch.bucketize(confidence, edges), confidence, correct, bins)


def sums(bin_of_each: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> BinSums:
    columns = torch.stack(
        [torch.ones_like(confidence, dtype=torch.float64), confidence.double(), correct.double()]
    )
    return BinSums(*columns.new_zeros(3, bins).index_add_(1, bin_of_each, columns))


class RunningScores:
    """Accuracy, NLL, Brier score and ECE over batches; equal to the functions on all of them, to rounding.

    Only sums are kept, so batches may differ in size and `merge` joins the work of several processes.
    AUROC and its kin need the order of all confidences and have no such form: keep the probabilities.

    >>> scores = RunningScores()
    >>> scores.update(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> scores.compute()["accuracy"]
    0.5
    """

    def __init__(self, bins: int = 20) -> None:
        self.examples = 0
        self.sums = torch.zeros(3, dtype=torch.float64)  # correct, NLL, Brier
        self.bins = BinSums(*torch.zeros(3, check_bins(bins), dtype=torch.float64))

    def update(self, probs: Tensor, targets: Tensor) -> None:
        """Add a batch; an empty one changes nothing, and so does one that raises an error."""
        probs, targets = check_pair(probs, targets, may_be_empty=True)
        correct = each_correct(probs, targets)
        scores = torch.stack([correct.double(), each_nll(probs, targets), each_brier(probs, targets)])
        binned = equal_width_sums(probs.amax(1), correct, len(self.bins.examples))
        self.add(len(probs), scores.sum(1).cpu(), BinSums(*(column.cpu() for column in binned)))

    def merge(self, other: "RunningScores") -> None:
        mine, theirs = len(self.bins.examples), len(other.bins.examples)
        if mine != theirs:
            raise InvalidValue(f"other has {theirs} bins and this {mine}; build both with the same bins=")
        self.add(other.examples, other.sums, other.bins)

    def compute(self) -> dict[str, float]:
        if self.examples == 0:
            raise CallOrderError("compute() came before any example; call update(probs, targets) first")
        accuracy, nll, brier = (self.sums / self.examples).tolist()
        return {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": self.bins.error()}

    def add(self, examples: int, sums: Tensor, bins: BinSums) -> None:
        self.examples += examples
        self.sums = self.sums + sums
        self.bins = BinSums(*(mine + new for mine, new in zip(self.bins, bins, strict=True)))
