"""A line of the paper's table of results, in the units of our metrics."""

from types import MappingProxyType
from typing import Final, TypeAlias

from credo.experiments.recipe import Published

Printed: TypeAlias = float | tuple[float, float]  # a mean, or a mean and its standard deviation
COLUMNS: Final = (
    "train_accuracy",
    "train_nll",
    "accuracy",
    "nll",
    "ece",
    "auroc",
    "epochs",
    "seconds_per_epoch",
)
IN_PERCENT: Final = ("train_accuracy", "accuracy")


def table(text: str) -> dict[str, Published]:
    """Lines of the paper's Table 3 by row: train accuracy, train NLL, accuracy, NLL, ECE, AUROC, epochs, seconds.

    A cell is a mean, a mean±sd, or "-" where there is no number to meet. Accuracies are in per cent there, fractions
    here.
    """
    return {name: line(cells) for name, *cells in map(str.split, text.strip().splitlines())}


def line(cells: list[str]) -> Published:
    found = {}
    for metric, cell in zip(COLUMNS, cells, strict=True):
        if cell != "-":
            mean, _, sd = cell.partition("±")
            value = float(mean) if "." in mean else int(mean)
            printed: Printed = (value, float(sd)) if sd else value
            found[metric] = fraction(printed) if metric in IN_PERCENT else pair(printed)
    return MappingProxyType(found)


def gaps(*, accuracy: float, nll: float) -> Published:
    """Train minus test accuracy, in points there and as a fraction here; test minus train NLL."""
    return MappingProxyType({"accuracy_gap": fraction(accuracy), "nll_gap": pair(nll)})


def pair(number: Printed) -> tuple[float, float | None]:
    return number if isinstance(number, tuple) else (number, None)


def fraction(percent: Printed) -> tuple[float, float | None]:
    mean, sd = pair(percent)
    return round(mean / 100, 8), None if sd is None else round(sd / 100, 8)  # 0.7198, not 0.7198000000000001


# RMSE and NLL of UCI regression with one hidden layer of 50, means over the standard splits. None: not published.
# PBP (Hernández-Lobato and Adams 2015), MC-dropout with a grid search (Mukhoti et al. 2018), ensembles
# (Lakshminarayanan et al. 2017), mean-field VI with the same network.
UCI: Final[dict[str, dict[str, tuple[float | None, float]]]] = {
    "PBP": {
        "bostonHousing": (3.01, 2.57),
        "concrete": (5.67, 3.16),
        "energy": (1.80, 2.04),
        "power-plant": (4.12, 2.84),
        "wine-quality-red": (0.64, 0.97),
        "yacht": (1.02, 1.63),
    },
    "MC-dropout (2018)": {
        "bostonHousing": (2.90, 2.40),
        "concrete": (4.82, 2.93),
        "energy": (0.54, 1.21),
        "power-plant": (4.01, 2.80),
        "wine-quality-red": (0.62, 0.93),
        "yacht": (0.67, 1.25),
    },
    "ensemble of 5": {
        "bostonHousing": (3.28, 2.41),
        "concrete": (6.03, 3.06),
        "energy": (2.09, 1.38),
        "power-plant": (4.11, 2.79),
        "wine-quality-red": (0.64, 0.94),
        "yacht": (1.58, 1.18),
    },
    "mean-field VI": {
        "bostonHousing": (None, 3.12),
        "concrete": (None, 3.22),
        "energy": (None, 0.93),
        "power-plant": (None, 2.85),
        "wine-quality-red": (None, 1.00),
        "yacht": (None, 2.01),
    },
}
