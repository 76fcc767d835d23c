"""The scores of a data set that never is in memory as a whole."""

import torch
from torch import Tensor

from credo.errors import CallOrderError, InvalidValue
from credo.metrics.calibration import BinSums, equal_width_sums
from credo.metrics.checks import check_bins, check_pair
from credo.metrics.scores import each_brier, each_correct, each_nll


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
        """Add a batch; an empty one changes nothing, and so does one that is refused."""
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
