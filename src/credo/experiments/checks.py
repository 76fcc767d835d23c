"""A Training is checked whole before a run begins, so that nothing fails for a typing mistake after an hour."""

import math
from typing import Any

from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import checked_options, method_of
from credo.experiments.names import known
from credo.experiments.networks import NETWORKS, options_of
from credo.experiments.recipe import Training
from credo.experiments.tasks import TASKS
from credo.optim.arguments import number, seed, whole

RESUME = ("auto", "fallback", True, False)


def check_training(training: Training) -> None:
    """Names, types and ranges; the error names the field."""
    if not isinstance(training, Training):
        raise InvalidType(f"training must be a Training, got {type(training).__name__}.")
    method = method_of(training.method)
    checked_options("settings", training.settings, method.settings)
    known("task", training.task, TASKS)
    if isinstance(training.model, str):
        known("model", training.model, NETWORKS)
        checked_options("model_options", training.model_options, options_of(training.model))
    elif not callable(training.model):
        raise InvalidType(f"model must be a name or a function, got {type(training.model).__name__}.")
    if not isinstance(training.data, str) and not callable(training.data):
        raise InvalidType(f"data must be a name or a function, got {type(training.data).__name__}.")
    _check_numbers(training)


def _check_numbers(training: Training) -> None:
    for name in ("epochs", "batch_size", "samples"):
        whole_number(name, getattr(training, name), 1)
    for name in (
        "train_size",
        "test_size",
        "validation_size",
        "epoch_samples",
        "epoch_test_size",
        "mc_groups",
    ):
        if getattr(training, name) is not None:
            whole_number(name, getattr(training, name), 1)
    for epoch in training.milestones:
        whole_number("milestones", epoch, 1)
    number("decay", training.decay, 0, math.inf, open_low=True)
    for name in ("warmup_epochs", "warmup_from", "tempering_epochs"):
        number(name, getattr(training, name), 0, math.inf)
    if training.tempering_from is not None:
        number("tempering_from", training.tempering_from, 0, 1, open_low=True)
    for name in ("augment", "cosine"):
        if not isinstance(getattr(training, name), bool):
            raise InvalidType(f"{name} must be True or False, got {getattr(training, name)!r}.")
    if training.cosine and training.warmup_epochs >= training.epochs:
        raise InvalidValue(
            f"cosine=True needs epochs after the warm-up: warmup_epochs={training.warmup_epochs} must be below "
            f"epochs={training.epochs}."
        )


def check_seed(value: Any) -> int:
    """0 … 2⁶³ − 1; there is no seed that means "any", so that every run can be repeated."""
    if not isinstance(value, int):
        raise InvalidType(f"seed must be a whole number of at least 0, got {value!r}.")
    return seed(value)


def check_resume(value: Any) -> None:
    if not any(value is option or value == option for option in RESUME):
        raise InvalidValue(f"resume must be 'auto', 'fallback', True or False, got {value!r}.")


def whole_number(name: str, value: Any, low: int) -> int:
    """As in a recipe: 10.0 is no 10 here."""
    if not isinstance(value, int):
        raise InvalidType(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}.")
    return whole(name, value, low)
