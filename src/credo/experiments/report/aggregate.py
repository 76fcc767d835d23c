"""Several seeds as one number: mean and standard deviation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """mean ± sd over seeds; sd = √(Σ(x − mean)²/(n − 1)) is None for a single seed, which has none."""

    mean: float
    sd: float | None = None
    best: bool = False


def aggregate(runs: Sequence[Mapping[str, float]]) -> dict[str, Cell]:
    """Cell by metric, for the metrics that all runs have."""
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: cell([run[key] for run in runs]) for key in shared}


def cell(values: Sequence[float]) -> Cell:
    """A seed in which the metric is undefined leaves the mean undefined: leaving it out would flatter."""
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)
    if len(values) == 1:
        return Cell(mean)
    return Cell(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def with_gaps(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and how far train and test are apart."""
    found = dict(metrics)
    if "train_accuracy" in found and "accuracy" in found:
        found["accuracy_gap"] = found["train_accuracy"] - found["accuracy"]
    if "train_nll" in found and "nll" in found:
        found["nll_gap"] = found["nll"] - found["train_nll"]
    return found
