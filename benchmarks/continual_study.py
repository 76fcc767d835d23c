"""VOGN's settings for the streams of tasks at CPU size, chosen on validation images.

    python -m benchmarks.continual_study permuted-mnist --data DIR
    python -m benchmarks.continual_study split-mnist --data DIR --only "small batches"

10,000 of the training images are kept apart and scored, on permutations that the recipe's seeds do not have; the test
images are never looked at. Prints for each setting `credo.continual.share_left` and, after each task, the accuracy on
every task so far; then their average. A setting takes five to ten minutes on one quiet core.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from credo import metrics
from credo.continual import Course, Task, annealed, share_left
from credo.data import Splits, load
from credo.experiments import Training
from credo.experiments.recipes.continual_mnist import FIVE, VOGN_ON_CPU, on
from credo.experiments.streams import course_of, learner_for, model_for, tasks_of

KINDS: Final = {"permuted-mnist": "permuted", "split-mnist": "split"}
SEED: Final = 100  # of the permutations and of the training; the recipes' are 0, 1, 2


def vogn(
    batch_size: int, hold: float, last_lr: float, epochs: int = 10, start: Any = "fresh", **settings: float
) -> Training:
    chosen = {**VOGN_ON_CPU.settings, "initial_precision": 1e4, **settings}
    tasks = replace(FIVE, hold=hold, last_lr=last_lr, start=start)
    return replace(VOGN_ON_CPU, epochs=epochs, batch_size=batch_size, settings=chosen, tasks=tasks)


STUDIES: Final[Mapping[str, Mapping[str, Training]]] = {
    "permuted-mnist": {
        "first": vogn(256, 0.7, 0.1, lr=5e-3, ema_rate=1e-2),
        "cooler": vogn(256, 0.6, 0.01, lr=5e-3, ema_rate=1e-2),
        "tempered": vogn(256, 0.6, 0.01, lr=5e-3, ema_rate=1e-2, tempering=0.5),
        "more steps": vogn(128, 0.7, 0.03, lr=5e-3, ema_rate=5e-3),
        "faster fading": vogn(128, 0.7, 0.03, lr=5e-3, ema_rate=1e-2, initial_precision=1e3),
        "still more steps": vogn(64, 0.7, 0.03, lr=3e-3, ema_rate=2.5e-3),
        "slower fading": vogn(128, 0.8, 0.03, lr=5e-3, ema_rate=3e-3, initial_precision=1e3),
    },
    "split-mnist": {
        "first": vogn(128, 0.7, 0.03, epochs=20, lr=5e-3, ema_rate=1e-2),
        "the old mean": vogn(128, 0.7, 0.03, epochs=20, start="mean", lr=5e-3, ema_rate=1e-2),
        "fast": vogn(128, 0.7, 0.03, epochs=20, lr=1e-2, ema_rate=2e-2, initial_precision=1e3),
        "fast, one rate": vogn(128, 0.7, 0.03, epochs=20, lr=1e-2, ema_rate=1e-2, initial_precision=1e3),
        "narrow prior": vogn(64, 0.7, 0.03, epochs=20, lr=5e-3, ema_rate=5e-3, prior_precision=100.0),
        "small batches": vogn(32, 0.7, 0.03, epochs=20, lr=5e-3, ema_rate=3e-3, initial_precision=1e3),
    },
}  # from an initial precision of 1e4 and a prior of N(0, 1) where nothing is said


def validation(root: Path) -> Splits:
    whole = load("mnist", root)
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(SEED))
    return replace(whole, train=whole.train.subset(order[10_000:]), test=whole.train.subset(order[:10_000]))


def study(name: str, training: Training, splits: Splits) -> None:
    assert training.tasks is not None
    tasks = tasks_of(training.tasks, splits, SEED)
    print(f"{name}: {left_by(training, tasks[0]):.1e} of a fresh start is left", flush=True)
    learner = learner_for(training, model_for(training, tasks), SEED)
    seen = 0

    def show(course: Course) -> None:
        nonlocal seen
        if len(course.matrix) > seen:
            seen = len(course.matrix)
            print(f"  {name}: " + " ".join(f"{100 * score:.2f}" for score in course.matrix[-1]), flush=True)

    matrix = course_of(learner, training, tasks, SEED).run(show)
    print(f"{name}: average {100 * metrics.average_accuracy(matrix):.2f}", flush=True)


def left_by(training: Training, task: Task) -> float:
    names = ("lr", "ema_rate", "initial_precision", "prior_precision")
    rates = {name: float(training.settings[name]) for name in names}
    steps = training.epochs * math.ceil(len(task) / training.batch_size)
    assert training.tasks is not None
    return share_left(steps, annealing=annealed(training.tasks.last_lr, training.tasks.hold), **rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=list(STUDIES))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    settings, splits = STUDIES[options.recipe], validation(options.data)
    for name in options.only or settings:
        study(name, on(settings[name], KINDS[options.recipe]), splits)


if __name__ == "__main__":
    main()
