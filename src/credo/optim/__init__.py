"""Optimisers that leave a posterior: same constructor style, same `sampled`, `step` and `posterior`."""

from credo.optim.base import BayesianOptimizer
from credo.optim.bayes_by_backprop import BayesByBackprop
from credo.optim.diagnostics import GroupDiagnostics
from credo.optim.ivon import IVON
from credo.optim.kfac import KFAC
from credo.optim.noisy_kfac import NoisyKFAC
from credo.optim.ogn import OGN
from credo.optim.schedules import TemperingSchedule
from credo.optim.vogn import VOGN

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
