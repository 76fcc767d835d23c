"""How each metric is headed, written and compared: the one list that terminal, Markdown and HTML share."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from credo.experiments.labels import set_label


@dataclass(frozen=True)
class Measure:
    """A column. Percentages are stored as fractions, as everywhere in credo, and written in per cent."""

    key: str
    heading: str
    better: Literal["higher", "lower", "neither"] = "neither"
    digits: int = 3  # 0 for counts, which have no spread
    percent: bool = False
    essential: bool = True  # shown in a terminal; the others only where there is room

    def text(self, mean: float, sd: float | None = None) -> str:
        """'67.32 ± 1.31', '0.938', or a dash for a number that is not defined."""
        if not math.isfinite(mean):
            return "–" if math.isnan(mean) else str(mean)
        factor = 100 if self.percent else 1
        spread = "" if sd is None or not self.digits else f" ± {factor * sd:.{self.digits}f}"
        return f"{factor * mean:.{self.digits}f}{spread}"


MEASURES: Final = (
    Measure("train_accuracy", "train accuracy %", digits=2, percent=True),
    Measure("accuracy", "accuracy %", "higher", digits=2, percent=True),
    Measure("accuracy_gap", "train − test accuracy", digits=2, percent=True),
    Measure("train_nll", "train NLL", essential=False),
    Measure("nll", "NLL", "lower"),
    Measure("nll_gap", "test − train NLL"),
    Measure("rmse", "RMSE", "lower"),
    Measure("brier", "Brier", "lower", essential=False),
    Measure("ece", "ECE", "lower"),
    Measure("auroc", "AUROC", "higher"),
    Measure("epochs", "epochs", digits=0, essential=False),
    Measure("seconds_per_epoch", "s/epoch", digits=2),
)
OOD: Final = {
    "ood_auroc": Measure("ood_auroc", "OOD AUROC", "higher"),
    "ood_fpr95": Measure("ood_fpr95", "OOD FPR95", "lower"),
}
GAPS: Final = ("accuracy_gap", "nll_gap")


def measures_of(keys: Iterable[str]) -> tuple[Measure, ...]:
    """The columns for these metrics in our order, scores on unfamiliar data before epochs and seconds; no others.

    A key such as `ood_auroc.svhn` belongs to the measure before the dot.
    """
    present = set(keys)
    known = [measure for measure in MEASURES if measure.key in present]
    scores = [measure for measure in known if measure.key not in ("epochs", "seconds_per_epoch")]
    return (*scores, *unfamiliar(present), *(measure for measure in known if measure not in scores))


def unfamiliar(keys: Iterable[str]) -> list[Measure]:
    """One column for each data set and score, the scores of a set beside each other."""
    split = [(key.partition(".")[2], key) for key in keys if key.partition(".")[0] in OOD]
    several = len({name for name, _ in split}) > 1
    found = []
    for name, key in sorted(split):
        base = OOD[key.partition(".")[0]]
        heading = f"{base.heading} {set_label(name)}" if several else base.heading
        found.append(Measure(key, heading, base.better))
    return found
