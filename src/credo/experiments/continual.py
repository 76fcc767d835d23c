"""Runs the recipes of continual learning: each (row, seed) in a folder of its own, resumable at any step.

credo run permuted-mnist --seeds 3 --data DATA --out runs

runs/permuted-mnist/cpu/vogn/seed-0/checkpoint/   while it runs
                                    course.json   written last: its presence means finished
runs/permuted-mnist/cpu/table.md, average-accuracy.png, average-accuracy.svg
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from credo import metrics
from credo.continual import Course, Learner, MultiHead, Task
from credo.data import Splits
from credo.errors import InvalidValue
from credo.experiments import streams
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.continual_learners import learner_for
from credo.experiments.continual_recipe import ContinualRecipe, ContinualRow, ContinualTraining, Size
from credo.experiments.lock import locked
from credo.experiments.machine import provenance
from credo.experiments.manifest import FORMAT_VERSION, read_signed, write_signed
from credo.experiments.ranks import Ranks
from credo.experiments.stopping import Stop, stop_request
from credo.models import MLP

FINISHED = "course.json"  # signed; not result.json, which is what a run on a single task leaves

SAVE_EVERY = 60.0  # seconds between checkpoints inside a task


def run(
    recipe: ContinualRecipe, row: ContinualRow, size: Size, seed: int, splits: Splits, out: Path
) -> dict[str, Any]:
    """One method with one seed; a finished run is read and not repeated, one that was cut off goes on.

    With a process group, all ranks call this; the folder must be one that all see, and rank 0 writes to it.
    """
    folder, training = out / recipe.name / size / row.name / f"seed-{seed}", row.training(size)
    asked = {"recipe": recipe.name, "row": row.name, "size": size, "seed": seed, "tasks": recipe.tasks[size]}
    asked["training"] = {**asdict(training), "settings": dict(training.settings)}
    ranks = Ranks()
    ranks.refuse_differences(asked)
    ranks.once(lambda: folder.mkdir(parents=True, exist_ok=True))
    with ranks.held_once(locked(folder / "lock")):
        if not ranks.once((folder / FINISHED).exists):
            tasks = tasks_of(recipe, recipe.tasks[size], splits, seed)
            learner = learner_for(training, model_of(recipe, tasks), seed)
            _train(course_of(learner, training, tasks, seed), asked, folder, ranks)
        return ranks.each(lambda: _finished(folder, asked))


def tasks_of(recipe: ContinualRecipe, tasks: int, splits: Splits, seed: int) -> list[Task]:
    return (
        streams.permuted(splits, tasks, seed) if recipe.stream == "permuted" else streams.split(splits, tasks)
    )


def model_of(recipe: ContinualRecipe, tasks: list[Task]) -> nn.Module:
    """The fully connected network, with one head for all tasks or a head for each."""
    inputs, classes = tasks[0].inputs.shape[1], int(max(int(task.targets.max()) for task in tasks)) + 1
    if recipe.stream == "permuted":
        return MLP((inputs, *recipe.hidden, classes))
    body = nn.Sequential(MLP((inputs, *recipe.hidden)), nn.ReLU())
    return MultiHead(body, lambda: nn.Linear(recipe.hidden[-1], classes))


def course_of(learner: Learner, training: ContinualTraining, tasks: list[Task], seed: int) -> Course:
    return Course(learner, tasks, epochs=training.epochs, batch_size=training.batch_size, seed=seed)


def _train(course: Course, asked: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Goes on from the last checkpoint, saves now and then, and once more when asked to stop."""
    checkpoints, before = Checkpoints(folder / "checkpoint"), 0.0
    saved = ranks.each(checkpoints.load_last)
    if saved is not None:
        _refuse_another(folder, saved["asked"], asked)
        ranks.warn_of_another_number(saved.get("processes", 1))
        course.load_state_dict(saved["course"])
        before = saved["seconds"]
    started = last = time.monotonic()

    def save() -> None:
        epoch = course.task * course.settings["epochs"] + course.epoch
        state = {
            "asked": asked,
            "course": course.state_dict(),
            "seconds": before + time.monotonic() - started,
            "processes": ranks.size,
        }
        ranks.once(lambda: str(checkpoints.save(epoch, course.steps, state)))

    with stop_request() as request:

        def watch(course: Course) -> None:
            nonlocal last
            signal, due = ranks.largest(request.signal or 0, time.monotonic() - last > SAVE_EVERY)
            if signal:
                raise Stop(signal)
            if due:
                save()
                last = time.monotonic()

        try:
            course.run(watch)
        except Stop as stop:
            save()
            stop.leave()
    seconds = before + time.monotonic() - started
    ranks.once(lambda: _write_result(course, asked, seconds, folder))


def _write_result(course: Course, asked: dict[str, Any], seconds: float, folder: Path) -> None:
    result = {
        "format": FORMAT_VERSION,
        **asked,
        "matrix": course.matrix,
        "average_accuracies": metrics.average_accuracies(course.matrix),
        "average_accuracy": metrics.average_accuracy(course.matrix),
        "backward_transfer": metrics.backward_transfer(course.matrix),
        "forgetting": metrics.forgetting(course.matrix),
        "seconds": seconds,
        **provenance(),
    }
    write_signed(folder / FINISHED, result)
    Checkpoints(folder / "checkpoint").clear()


def _finished(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    result = read_signed(folder / FINISHED)
    _refuse_another(folder, result, asked)
    return result


def _refuse_another(folder: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    different = [name for name, value in asked.items() if saved.get(name) != value]
    if different:
        name = different[0]
        raise InvalidValue(
            f"{folder} holds another run: {name} was {saved.get(name)!r}, now {asked[name]!r}. Choose another folder, "
            "or remove this one."
        )
