"""VOGN's settings for Permuted MNIST at CPU size, chosen on validation images.

    python -m benchmarks.permuted_study --data DIR

10,000 of the training images are kept apart and scored, on permutations that the recipe's seeds do not have; the test
images are never looked at. Prints, after each task, the accuracy on every task so far; then their average. A setting
takes some five minutes on one quiet core.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from credo import metrics
from credo.continual import Course
from credo.data import Splits, load
from credo.experiments.continual import model_of
from credo.experiments.continual_learners import learner_for
from credo.experiments.continual_recipe import ContinualTraining
from credo.experiments.recipes.permuted_mnist import PERMUTED_MNIST, VOGN_ON_CPU
from credo.experiments.streams import permuted

SEED: Final = 100  # of the permutations and of the training; the recipe's are 0, 1, 2


def vogn(batch_size: int, hold: float, last_lr: float, **settings: float) -> ContinualTraining:
    chosen = {**VOGN_ON_CPU.settings, **settings}
    return replace(VOGN_ON_CPU, batch_size=batch_size, hold=hold, last_lr=last_lr, settings=chosen)


SETTINGS: Final[Mapping[str, ContinualTraining]] = {
    "first": vogn(256, 0.7, 0.1, lr=5e-3, ema_rate=1e-2),
    "cooler": vogn(256, 0.6, 0.01, lr=5e-3, ema_rate=1e-2),
    "tempered": vogn(256, 0.6, 0.01, lr=5e-3, ema_rate=1e-2, tempering=0.5),
    "more steps": vogn(128, 0.7, 0.03, lr=5e-3, ema_rate=5e-3),
}  # all from an initial precision of 1e4


def validation(root: Path) -> Splits:
    whole = load("mnist", root)
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(SEED))
    return replace(whole, train=whole.train.subset(order[10_000:]), test=whole.train.subset(order[:10_000]))


def study(name: str, training: ContinualTraining, splits: Splits) -> None:
    tasks = permuted(splits, PERMUTED_MNIST.tasks["cpu"], SEED)
    learner = learner_for(training, model_of(PERMUTED_MNIST, tasks), SEED)
    course = Course(learner, tasks, epochs=training.epochs, batch_size=training.batch_size, seed=SEED)
    seen = 0

    def show(course: Course) -> None:
        nonlocal seen
        if len(course.matrix) > seen:
            seen = len(course.matrix)
            print(f"  {name}: " + " ".join(f"{100 * score:.2f}" for score in course.matrix[-1]), flush=True)

    matrix = course.run(show)
    print(f"{name}: average {100 * metrics.average_accuracy(matrix):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    splits = validation(options.data)
    for name in options.only:
        study(name, SETTINGS[name], splits)


if __name__ == "__main__":
    main()
