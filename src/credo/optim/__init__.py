"""Optimisers that leave a posterior: same constructor style, same `sampled`, `step` and `posterior`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credo.optim.base import BayesianOptimizer
from credo.optim.diagnostics import GroupDiagnostics
from credo.optim.schedules import TemperingSchedule
from credo.optim.vogn import OGN, VOGN

if TYPE_CHECKING:
    from credo.optim.bayes_by_backprop import BayesByBackprop
    from credo.optim.ivon import IVON
    from credo.optim.kfac import KFAC, NoisyKFAC

# Imported when they are first asked for: importing credo should cost little.
LATER = {"BayesByBackprop": "bayes_by_backprop", "IVON": "ivon", "KFAC": "kfac", "NoisyKFAC": "kfac"}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"credo.optim.{LATER[name]}"), name)
    raise AttributeError(f"module 'credo.optim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER})


__all__ = [
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "BayesByBackprop",
    "BayesianOptimizer",
    "GroupDiagnostics",
    "NoisyKFAC",
    "TemperingSchedule",
]
