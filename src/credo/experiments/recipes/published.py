"""A line of the paper's table of results, in the units of our metrics."""

from types import MappingProxyType
from typing import TypeAlias

from credo.experiments.recipe import Published

Printed: TypeAlias = float | tuple[float, float]  # a mean, or a mean and its standard deviation


def numbers(
    *,
    train: Printed,
    train_nll: Printed,
    accuracy: Printed,
    nll: Printed,
    ece: Printed | None,
    auroc: Printed | None,
    epochs: int,
    seconds: float,
) -> Published:
    """In the order of the paper's Table 3; accuracies in per cent there and in [0, 1] here; None: no number to meet."""
    found = {
        "train_accuracy": fraction(train),
        "train_nll": pair(train_nll),
        "accuracy": fraction(accuracy),
        "nll": pair(nll),
        "ece": None if ece is None else pair(ece),
        "auroc": None if auroc is None else pair(auroc),
        "epochs": pair(epochs),
        "seconds_per_epoch": pair(seconds),
    }
    return MappingProxyType({metric: value for metric, value in found.items() if value is not None})


def gaps(*, accuracy: float, nll: float) -> Published:
    """Train minus test accuracy, in points there and as a fraction here; test minus train NLL."""
    return MappingProxyType({"accuracy_gap": fraction(accuracy), "nll_gap": pair(nll)})


def pair(number: Printed) -> tuple[float, float | None]:
    return number if isinstance(number, tuple) else (number, None)


def fraction(percent: Printed) -> tuple[float, float | None]:
    mean, sd = pair(percent)
    return round(mean / 100, 8), None if sd is None else round(sd / 100, 8)  # 0.7198, not 0.7198000000000001
