"""Where a search is called: for a row of a recipe, and for a model and data of one's own."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import METHODS, method_of
from credo.experiments.names import plain_name
from credo.experiments.overrides import check_training
from credo.experiments.recipe import Recipe, Setting, Training
from credo.experiments.run import trainings
from credo.experiments.run_folder import described
from credo.experiments.state import private_randomness
from credo.experiments.tuning.outcome import CLASSES, Tuned, outcome, write_files
from credo.experiments.tuning.spaces import SPACES, Search, space_of
from credo.experiments.tuning.study import Budget, counted, display_for, optuna_module, quiet, search
from credo.experiments.tuning.trials import Own, Problem, source_of_own, source_of_row

TRIALS: Final = 20
VALIDATION: Final = 0.2


def tune(
    build_model: Callable[..., nn.Module],
    data: Own,
    *,
    method: str | type = "vogn",
    validation: Own | None = None,
    validation_fraction: float | None = None,
    trials: int | None = None,
    minutes: float | None = None,
    epochs: int = 10,
    batch_size: int = 128,
    settings: Mapping[str, Setting] | None = None,
    search: Search | None = None,
    task: str = "classification",
    samples: int = 10,
    milestones: tuple[int, ...] = (),
    data_size: int | None = None,
    out: str | PathLike[str] = "tuned",
    seed: int = 0,
    seeds: int = 1,
    device: str = "cpu",
    progress: bool = True,
) -> Tuned:
    """Search the numbers of a method for one's own model and data, by NLL on validation data.

        found = credo.tune(build_model, (x, y), validation_fraction=0.2, trials=20)
        print(found.table(), found.constructor, sep="\\n")
        optimizer = found.optimizer(model, data_size=len(x))

    build_model: a function that makes a fresh model. For MC-dropout it takes `dropout`, the rate, with a default.
    data: (inputs, targets) as tensors, `credo.data.Examples`, or a loader of such pairs; never the test data.
    method: a name (`credo list` shows them) or a class such as credo.VOGN or torch.optim.Adam.
    validation, validation_fraction: further data of the same kind, or the share of `data` to keep for it. One of them.
    trials, minutes: how long to search; 20 trials unless given. Minutes are of all starts together; the trial under way
        is finished.
    settings: keyword arguments of the optimiser. What is searched starts from them, and the rest stays.
    search: which numbers (`credo.experiments.tuning.SPACES` has a row for each method); a mapping gives ranges.
    epochs, batch_size: of every trial.
    task, samples: of `credo.predict`, which makes the validation NLL.
    data_size: N, where the training data do not tell their number.
    device: where trials run; progress: whether a bar is shown.
    milestones: epochs after which the learning rate falls to a tenth.
    seed, seeds: every trial is trained with `seeds` seeds, `seed` the first, and its score is the mean. With few data
        one seed decides more than the numbers do. Whether a trial is dropped early, the first decides.
    out: the study goes to a folder of the method's name in here. The same call again goes on where it was.
    """
    training = Training(
        method_name(method),
        build_model,
        _nowhere,
        settings=dict(settings or {}),
        model_options=_dropout_option(build_model),
        epochs=epochs,
        batch_size=batch_size,
        samples=samples,
        milestones=tuple(milestones),
        task=task,
    )
    check_training(training)
    budget = budget_of(trials, minutes)
    source = source_of_own(data, validation, validation_fraction, data_size, training)
    problem = Problem(training, source, seed, torch.device(device), seeds)
    return _tuned(problem, search, Path(out) / training.method, budget, progress, "own model", None)


def tune_row(
    recipe: Recipe,
    row: str,
    *,
    size: str = "cpu",
    overrides: Mapping[str, object] | None = None,
    from_defaults: bool = False,
    validation_fraction: float = VALIDATION,
    trials: int | None = None,
    minutes: float | None = None,
    search: Search | None = None,
    out: str | PathLike[str] = "tuned",
    data_root: str | PathLike[str] | None = None,
    seed: int = 0,
    seeds: int = 1,
    device: str = "cpu",
    progress: bool = True,
) -> Tuned:
    """Search the numbers of one row of a recipe; arguments as in `tune`.

    The search starts from the row's settings, or, `from_defaults`, from the method's own.
    validation_fraction: of the data set's training half; the test half is not looked at.
    """
    if recipe.is_stream:
        raise InvalidValue(
            f"{recipe.name} is a stream of tasks, and a search is for recipes with a single one."
        )
    training = trainings(recipe, size, [row], overrides or {})[row]
    if from_defaults:
        searched = {n.argument for n in SPACES.get(training.method, ())}
        kept = {name: value for name, value in training.settings.items() if name not in searched}
        training = replace(training, settings=kept)
    budget = budget_of(trials, minutes)
    source = source_of_row(training, None if data_root is None else Path(data_root), validation_fraction)
    folder = Path(out) / plain_name("recipe name", recipe.name) / size / row
    problem = Problem(training, source, seed, torch.device(device), seeds)
    return _tuned(problem, search, folder, budget, progress, recipe.name, row)


def _tuned(
    problem: Problem,
    asked: Search | None,
    folder: Path,
    budget: Budget,
    progress: bool,
    title: str,
    row: str | None,
) -> Tuned:
    """All errors in what was asked for come before the folder is touched."""
    optuna_module()
    training = problem.training
    with private_randomness(problem.seed, problem.device):
        model, learner = problem.learner(training, problem.seed)
        space = space_of(training, learner.optimizer, asked)
    identity = {
        **described(training),
        "model": signature(model),
        "data": problem.source.described(),
        "search": space.described(),
        "seed": problem.seed,
        "seeds": problem.seeds,
    }
    study = search(problem, space, folder, budget, identity, display_for(progress))
    with quiet():
        tuned = outcome(training, counted(study), folder)
        write_files(tuned, title, row)
    return tuned


def signature(model: nn.Module) -> str:
    """Of a model's modules and parameters, the same in every process; the function that made it may change its name."""
    modules = [f"{name}:{type(module).__name__}" for name, module in model.named_modules()]
    parameters = [f"{name}:{tuple(p.shape)}" for name, p in model.named_parameters()]
    digest = hashlib.sha256("\n".join([*modules, *parameters]).encode()).hexdigest()[:12]
    return f"{type(model).__name__} with {sum(p.numel() for p in model.parameters())} parameters, {digest}"


def budget_of(trials: int | None, minutes: float | None) -> Budget:
    return Budget(TRIALS if trials is None and minutes is None else trials, minutes)


def method_name(method: Any) -> str:
    """A name, or the class that a method's constructor line has."""
    if isinstance(method, str):
        method_of(method)
        return method
    word = f"{getattr(method, '__module__', '').partition('.')[0]}.{getattr(method, '__name__', '')}"
    found = [
        name
        for name, path in CLASSES.items()
        if (path.split(".")[0], path.split(".")[-1]) == tuple(word.split("."))
    ]
    if not found:
        raise InvalidType(
            f"method must be a name or an optimiser's class, got {method!r}; there are {', '.join(METHODS)}."
        )
    return found[0]


def _dropout_option(build_model: Any) -> dict[str, Setting]:
    """The default rate of a model function that takes one."""
    if not callable(build_model):
        raise InvalidType(
            f"build_model must be a function that makes a model, got {type(build_model).__name__}."
        )
    try:
        parameter = inspect.signature(build_model).parameters.get("dropout")
    except (TypeError, ValueError):  # a callable without a signature
        return {}
    default = None if parameter is None else parameter.default
    return {"dropout": float(default)} if isinstance(default, int | float) and default > 0 else {}


def _nowhere() -> Any:
    """Stands for data that were handed over: nothing reads them by name."""
    raise AssertionError
