"""From a row of a recipe to a learner."""

from typing import Any

import torch
from torch import nn

from credo.continual import Learner, Point, Variational, annealed
from credo.experiments.continual_recipe import ContinualTraining
from credo.experiments.names import known
from credo.optim import VOGN
from credo.posterior import Posterior


def learner_for(training: ContinualTraining, model: nn.Module, seed: int) -> Learner:
    """The learner that `training` describes, for a model as it is before the first task."""
    make = METHODS[known("method", training.method, METHODS)]
    learner: Learner = make(training, model, seed)
    return learner


def _vogn(training: ContinualTraining, model: nn.Module, seed: int) -> Learner:
    return _variational(VOGN, training, model, seed)


def _vcl(training: ContinualTraining, model: nn.Module, seed: int) -> Learner:
    from credo.optim import BayesByBackprop

    return _variational(BayesByBackprop, training, model, seed)


def _variational(optimizer: Any, training: ContinualTraining, model: nn.Module, seed: int) -> Learner:
    def make(model: nn.Module, data_size: int, prior: Posterior | None, seed: int) -> Any:
        return optimizer(model, data_size=data_size, prior=prior, seed=seed, **training.settings)

    return Variational(
        model,
        make,
        start=training.start,
        new_precision=float(
            training.settings.get("prior_precision", 1.0)
        ),  # later heads have the first one's prior
        annealing=annealed(training.last_lr, training.hold),
        samples=training.samples,
        seed=seed,
    )


def _point(training: ContinualTraining, model: nn.Module, seed: int) -> Learner:
    return Point(
        model,
        lambda parameters: torch.optim.Adam(parameters, **training.settings),  # type: ignore[arg-type]
        ewc=training.strength if training.method == "ewc" else None,
        online=training.online,
        joint=training.method == "joint",
        annealing=annealed(training.last_lr, training.hold),
        seed=seed,
    )


METHODS: dict[str, Any] = {"vogn": _vogn, "vcl": _vcl, "ewc": _point, "adam": _point, "joint": _point}
