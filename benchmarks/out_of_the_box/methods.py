"""The methods, each as its users meet it: nothing is set but the number of training examples.

torch's optimisers have their own defaults; SGD, which has no default that trains, the customary 0.1 with momentum 0.9
(0.01 for regression and fine-tuning, where 0.1 diverges).
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import credo
from benchmarks.out_of_the_box.problems import Problem

Make = Callable[[nn.Module, int, int, Problem], torch.optim.Optimizer]  # model, examples, seed, problem


def _ours(kind: Callable[..., Any]) -> Make:
    return lambda model, size, seed, problem: kind(model, data_size=size, seed=seed)


def _torchs(kind: Callable[..., Any]) -> Make:
    return lambda model, size, seed, problem: kind(model.parameters())


def _sgd(model: nn.Module, size: int, seed: int, problem: Problem) -> torch.optim.Optimizer:
    careful = problem.task == "regression" or problem.prepare is not None
    return torch.optim.SGD(model.parameters(), lr=0.01 if careful else 0.1, momentum=0.9)


METHODS: dict[str, Make] = {
    "Adam": _torchs(torch.optim.Adam),
    "AdamW": _torchs(torch.optim.AdamW),
    "SGD": _sgd,
    "VOGN": _ours(credo.VOGN),
    "OGN": _ours(credo.OGN),
    "IVON": _ours(credo.IVON),
    "KFAC": _ours(credo.KFAC),
    "NoisyKFAC": _ours(credo.NoisyKFAC),
    "BayesByBackprop": _ours(credo.BayesByBackprop),
}

if find_spec("ivon") is not None:
    import ivon  # type: ignore[import-untyped]

    METHODS["ivon-opt"] = lambda model, size, seed, problem: ivon.IVON(model.parameters(), lr=0.1, ess=size)
