"""The methods by name: their options, and how to build a learner from them.

A further method joins with one entry in METHODS. Options are the keyword arguments of its `optimizer` function; their
defaults give their types, and a wrong name or type is an error before anything is built.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from credo.errors import InvalidType, InvalidValue
from credo.experiments.learners import (
    Approximation,
    BatchLearner,
    DropoutApproximation,
    LaplaceApproximation,
    PlainLearner,
    PosteriorLearner,
    SwagApproximation,
)
from credo.experiments.names import known, unknown
from credo.experiments.recipe import Setting
from credo.experiments.tasks import PredictionTask
from credo.optim import IVON, KFAC, OGN, VOGN, BayesByBackprop, NoisyKFAC
from credo.optim.arguments import number
from credo.optim.bayes_by_backprop import RELATIVE
from credo.optim.groups import parameter_groups

# Not the recipe's to choose
GIVEN: Final = frozenset({"params", "model", "data_size", "seed", "prior", "reduction"})
FOR_THE_TASK: Final[Mapping[str, Setting]] = {"noise_variance": 1.0}  # of a regression's observations
# On the numbers that an optimiser chose by itself: what it holds in its parameter groups is multiplied.
FACTORS: Final[Mapping[str, Setting]] = {"lr_factor": 1.0, "noise_factor": 1.0, "damping_factor": 1.0}


@dataclass(frozen=True)
class Method:
    """`optimizer(model, **given and options)` is put to work by a learner.

    One of credo's own is its posterior; `approximation(model, **options)` makes one of what a torch optimiser finds.
    """

    title: str
    optimizer: Callable[..., Optimizer]
    approximation: Callable[..., Approximation] | None = None
    gives: tuple[str, ...] = ()  # which of data_size and seed the optimizer takes

    @property
    def options(self) -> dict[str, object]:
        """Name → default; `None` stands for an optional number."""
        return {**_options(self.optimizer), **self.approximation_options}

    @property
    def approximation_options(self) -> dict[str, object]:
        """Those of `options` that are not the optimizer's."""
        return {} if self.approximation is None else _options(self.approximation)

    @property
    def settings(self) -> dict[str, object]:
        """All that `settings` of a recipe may hold, with the defaults."""
        return {**self.options, **FOR_THE_TASK, **FACTORS}

    def build(
        self,
        model: nn.Module,
        task: PredictionTask,
        *,
        data_size: int,
        seed: int,
        settings: Mapping[str, Setting],
    ) -> BatchLearner:
        given = {"data_size": data_size, "seed": seed}
        checked = checked_options("settings", settings, self.settings)
        options = {name: value for name, value in checked.items() if name in self.options}
        own = {name: options.pop(name) for name in self.approximation_options if name in options}
        optimizer: Any = self.optimizer(model, **{name: given[name] for name in self.gives}, **options)
        for name in FACTORS:
            if name in checked:
                multiply(optimizer, name.removesuffix("_factor"), float(checked[name]))
        if self.approximation is None:
            return PosteriorLearner(model, optimizer, task)
        return PlainLearner(model, optimizer, task, self.approximation(model, **own))


def _options(function: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if name not in GIVEN}


def multiply(optimizer: Optimizer, name: str, factor: float) -> None:
    """A number in every parameter group, and the default that schedules start from."""
    number(f"{name}_factor", factor, 0, math.inf, open_low=True)
    holders = [*optimizer.param_groups, optimizer.defaults]
    if any(not isinstance(holder.get(name), int | float) for holder in holders):
        raise InvalidValue(
            f"{name}_factor={factor:g} multiplies what the method chose as {name}, and with these settings it has "
            f"chosen none. Leave {name}_factor out, or leave out what stands in its place (damping, tempering)."
        )
    for holder in holders:
        holder[name] *= factor


def sgd(
    model: nn.Module,
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,  # the paper's L2: δ/N
    nesterov: bool = False,
) -> Optimizer:
    return torch.optim.SGD(_decaying(model, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)


def adam(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,  # the paper's L2, added to the gradient
) -> Optimizer:
    return torch.optim.Adam(_decaying(model, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,  # decoupled: a share of the weights, times lr, is taken away
) -> Optimizer:
    return torch.optim.AdamW(_decaying(model, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def ivon(
    model: nn.Module,
    *,
    data_size: int,
    seed: int = 0,
    lr: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.99999,
    prior_precision: float | None = None,
    tempering: float | None = None,
    averaging: float | None = None,
    mc_samples: int = 1,
    augmentation: float = 1.0,
    initial_curvature: float | None = None,
    clip_radius: float | None = None,
    shared_noise: bool = False,
) -> Optimizer:
    return IVON(
        model,
        lr,
        data_size=data_size,
        betas=(beta1, beta2),
        prior_precision=prior_precision,
        tempering=tempering,
        averaging=averaging,
        mc_samples=mc_samples,
        augmentation=augmentation,
        initial_curvature=initial_curvature,
        clip_radius=clip_radius,
        seed=seed,
        shared_noise=shared_noise,
    )


def _decaying(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Normalisation layers do not decay, as they have no prior under a posterior."""
    return [
        {"params": group["params"], "weight_decay": 0.0 if group.get("deterministic") else weight_decay}
        for group in parameter_groups(model)
    ]


METHODS: Final[dict[str, Method]] = {
    "sgd": Method("SGD", sgd, Approximation),
    "adam": Method("Adam", adam, Approximation),
    "adamw": Method("AdamW", adamw, Approximation),
    "mc_dropout": Method(
        "MC-dropout", sgd, DropoutApproximation
    ),  # the model's dropout variant, trained with SGD
    "swag": Method("SWAG", sgd, SwagApproximation),
    "laplace": Method("Laplace", adamw, LaplaceApproximation),
    "ogn": Method("OGN", OGN, gives=("data_size", "seed")),
    "vogn": Method("VOGN", VOGN, gives=("data_size", "seed")),
    "bbb": Method("BBB", BayesByBackprop, gives=("data_size", "seed")),
    "ivon": Method("IVON", ivon, gives=("data_size", "seed")),
    "kfac": Method("K-FAC", KFAC, gives=("data_size", "seed")),
    "noisy_kfac": Method("Noisy K-FAC", NoisyKFAC, gives=("data_size", "seed")),
}


def method_of(name: str) -> Method:
    return METHODS[known("method", name, METHODS)]


def checked_options(
    where: str, given: Mapping[str, Setting], options: Mapping[str, object]
) -> dict[str, Setting]:
    """The given values, each under a name that exists and of the type of its default."""
    for name, value in given.items():
        if name not in options:
            raise unknown(f"key in {where}:", name, options)
        check_type(f"{where}[{name!r}]", value, options[name])
    return dict(given)


def check_type(name: str, value: object, default: object) -> None:
    """Whether `value` is what a default such as this stands for; a whole number may stand for a real one."""
    if default == RELATIVE:  # the word, or a number in its place
        wanted: tuple[type, ...] = (str, int, float)
    elif isinstance(default, bool | str):
        wanted = (type(default),)
    elif isinstance(default, int):
        wanted = (int,)
    elif isinstance(default, float) or default is None:
        wanted = (int, float)
    else:
        raise InvalidValue(f"{name} cannot be set in a recipe.")
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise InvalidType(
            f"{name} must be a {' or '.join(t.__name__ for t in wanted)}, got {value!r} of type {type(value).__name__}."
        )
