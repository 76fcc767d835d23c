"""An ensemble of finished runs that differ in their seeds: a run of its own, that trains nothing.

Its folder has a config, predictions and a result as every run's, an empty log, and no weights: `Result.model` and
`Result.belief` take those of the members. What one member costs, the ensemble costs as many times.
"""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from statistics import mean

import safetensors.torch
import torch

from credo.errors import InvalidValue
from credo.experiments.build import run_data
from credo.experiments.checkpoint import is_finished, write_signed
from credo.experiments.ranks import Ranks
from credo.experiments.recipe import Training
from credo.experiments.results import FORMAT_VERSION, Result, entry, inputs_of, load_result, named_predictions
from credo.experiments.run_folder import RunFolder, RunName, finite, write_log
from credo.experiments.tasks import Evaluator, task_of
from credo.posterior.files import write_atomically
from credo.predict import Ensemble

AVERAGED = ("train_accuracy", "train_nll", "epochs", "steps")
SUMMED = ("seconds_per_epoch", "refused")


def ensemble_row(row: str, members: int) -> str:
    return f"{row}-ensemble-{members}"


def ensemble_of(
    training: Training,
    members: Sequence[Path],
    folder: str | PathLike[str],
    *,
    data_root: str | PathLike[str] | None = None,
    name: RunName | None = None,
    device: str = "cpu",
) -> Result:
    """Predictions of the equal mixture of finished runs of `training`, evaluated as each of them was."""
    if len(members) < 2:
        raise InvalidValue(f"an ensemble needs at least 2 members, got {len(members)}")
    place, ranks = RunFolder(folder), Ranks()
    if ranks.once(lambda: is_finished(place, training, 0)):
        return load_result(place.path)
    for member in members:
        if not RunFolder(member).finished:
            raise InvalidValue(f"{member} has not finished; an ensemble is made of finished runs")
    ranks.once(place.make)
    with ranks.held_once(place.locked()):
        found = [load_result(member) for member in members]
        for seed, one in enumerate(found):
            RunFolder(one.folder).compare(training, one.seed, strictly=True)
            if one.seed != seed:
                raise InvalidValue(
                    f"{one.folder} should be the run with seed {seed}, and has seed {one.seed}"
                )
        _write(place, training, found, name or RunName(), data_root, torch.device(device), ranks)
    return load_result(place.path)


def _write(
    place: RunFolder,
    training: Training,
    members: list[Result],
    name: RunName,
    data_root: str | PathLike[str] | None,
    device: torch.device,
    ranks: Ranks,
) -> None:
    data = ranks.each(lambda: run_data(training, None if data_root is None else Path(data_root)))
    task = task_of(training)
    evaluator = Evaluator(task, data.normalise, training.samples, 0, device, lambda: None, ranks)
    factory = None if isinstance(training.model, str) else training.model
    models = [member.model(factory).to(device) for member in members]
    mixture = Ensemble([(m, one.belief(m)) for m, one in zip(models, members, strict=True)])
    test = evaluator.predict(models[0], mixture, data.test)
    validation = None if data.validation is None else evaluator.predict(models[0], mixture, data.validation)
    unfamiliar = {n: evaluator.predict(models[0], mixture, part) for n, part in data.ood.items()}

    def write() -> None:
        folders = [os.path.relpath(member.folder, place.path) for member in members]  # they may move together
        place.write_config(training, 0, name, [], {"members": folders})
        write_log(place.log, [])
        write_atomically(
            place.predictions, safetensors.torch.save(named_predictions(test, validation, unfamiliar))
        )
        metrics = {**_of_members(members), **evaluator.scores(test), **evaluator.ood_scores(test, unfamiliar)}
        result = {
            "format": FORMAT_VERSION,
            "metrics": metrics,
            "curve": evaluator.curve(test),
            "inputs": inputs_of(data),
            "files": {path.name: entry(path) for path in (place.predictions, place.log)},
        }
        write_signed(place.result, finite(result))

    ranks.once(write)


def _of_members(members: list[Result]) -> dict[str, float]:
    """What is theirs: fits to the training data as means, costs as sums."""
    averaged = {key: mean(m.metrics[key] for m in members) for key in AVERAGED if key in members[0].metrics}
    summed = {key: sum(m.metrics[key] for m in members) for key in SUMMED if key in members[0].metrics}
    return {**averaged, **summed, "members": len(members)}
