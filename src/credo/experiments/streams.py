"""Streams of tasks: made from one data set, learned one after the other by the loop of `train`.

permuted   the pixels in another order for each task, and one head for all
split      the classes in pairs, and a head for each

runs/permuted-mnist/cpu/vogn/seed-0/checkpoint/   while it runs
                                    course.json   written last: its presence means finished
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from credo import metrics
from credo.continual import Course, Learner, MultiHead, Point, Task, Variational, annealed
from credo.data import Splits
from credo.errors import InvalidType, InvalidValue
from credo.experiments.build import build_model, options_of, splits_of
from credo.experiments.checkpoint import FORMAT_VERSION, Checkpoints, write_signed
from credo.experiments.methods import method_of
from credo.experiments.names import known
from credo.experiments.ranks import Ranks
from credo.experiments.recipe import Setting, TaskStream, Training
from credo.experiments.run_folder import (
    RunFolder,
    RunName,
    check_same_stream,
    described_stream,
    provenance,
)
from credo.experiments.state import Work
from credo.experiments.watchers import Watcher
from credo.models import MLP
from credo.optim import VOGN, BayesByBackprop
from credo.posterior import Posterior

# The tasks


def tasks_of(stream: TaskStream, splits: Splits, seed: int) -> list[Task]:
    if stream.kind == "permuted":
        return permuted(splits, stream.count, seed)
    return split(splits, stream.count)


def permuted(splits: Splits, tasks: int, seed: int) -> list[Task]:
    """Each task is the whole data set with its own permutation of the pixels; the first is not permuted."""
    (x, y), (x_test, y_test) = _pixels(splits)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(x.shape[1])]
    orders += [torch.randperm(x.shape[1], generator=generator) for _ in range(tasks - 1)]
    return [
        Task(f"permutation_{k}", x, y, x_test, y_test, transform=_permutation(order))
        for k, order in enumerate(orders)
    ]


def split(splits: Splits, tasks: int) -> list[Task]:
    """Task k tells the classes 2k and 2k + 1 apart, with a head of its own and labels 0 and 1."""
    (x, y), (x_test, y_test) = _pixels(splits)
    classes = int(y.max()) + 1
    if 2 * tasks > classes:
        raise InvalidValue(f"tasks={tasks} needs {2 * tasks} classes in pairs; {splits.name} has {classes}")
    found = []
    for k in range(tasks):
        rows, test_rows = y // 2 == k, y_test // 2 == k
        name = f"{2 * k}_or_{2 * k + 1}"
        found.append(
            Task(name, x[rows], y[rows] % 2, x_test[test_rows], y_test[test_rows] % 2, head=f"head_{k}")
        )
    return found


def _permutation(order: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda inputs: inputs[:, order]


def _pixels(splits: Splits) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train and test as rows of pixels in [0, 1] with their classes."""
    parts = []
    for part in (splits.train, splits.test):
        if not isinstance(part.inputs, Tensor):
            raise InvalidType(f"{splits.name} does not lie in memory; streams of tasks need tensors")
        pixels = part.inputs.flatten(1).float()
        parts.append((pixels / 255 if part.inputs.dtype == torch.uint8 else pixels, part.targets))
    return parts[0], parts[1]


# The model and the method


def model_for(training: Training, tasks: list[Task]) -> nn.Module:
    """The network with one head for all tasks; or the hidden layers of the MLP with a head for each."""
    inputs, classes = tasks[0].inputs.shape[1], int(max(int(task.targets.max()) for task in tasks)) + 1
    if tasks[0].head is None:
        return build_model(training, (inputs,), classes)
    options: dict[str, Any] = {**options_of("mlp"), **training.model_options}
    hidden = [options["width"]] * options["layers"]
    body = nn.Sequential(MLP((inputs, *hidden)), nn.ReLU())
    return MultiHead(body, lambda: nn.Linear(hidden[-1], classes))


@dataclass(frozen=True)
class StreamMethod:
    """What learns a stream of tasks."""

    title: str
    learner: Callable[
        [Training, nn.Module, int], Learner
    ]  # for a model as it is before the first task, and a seed
    settings: Mapping[str, object]  # with their defaults: keyword arguments of the optimiser


def learner_for(training: Training, model: nn.Module, seed: int) -> Learner:
    return stream_method(training.method).learner(training, model, seed)


def stream_method(name: str) -> StreamMethod:
    return METHODS[known("method of a stream of tasks:", name, METHODS)]


def _variational(optimizer: Any) -> Callable[[Training, nn.Module, int], Learner]:
    def learner(training: Training, model: nn.Module, seed: int) -> Learner:
        def make(model: nn.Module, data_size: int, prior: Posterior | None, seed: int) -> Any:
            return optimizer(model, data_size=data_size, prior=prior, seed=seed, **training.settings)

        stream = _stream(training)
        precision = training.settings.get("prior_precision", 1.0)  # later heads have the first one's prior
        return Variational(
            model,
            make,
            start=stream.start,
            new_precision=float(precision),
            annealing=annealed(stream.last_lr, stream.hold),
            samples=training.samples,
            seed=seed,
        )

    return learner


def _point(training: Training, model: nn.Module, seed: int) -> Learner:
    stream = _stream(training)
    return Point(
        model,
        lambda parameters: torch.optim.Adam(parameters, **training.settings),  # type: ignore[arg-type]
        ewc=stream.strength if training.method == "ewc" else None,
        online=stream.online,
        joint=training.method == "joint",
        annealing=annealed(stream.last_lr, stream.hold),
        seed=seed,
    )


def _stream(training: Training) -> TaskStream:
    assert training.tasks is not None
    return training.tasks


ADAM: Final[Mapping[str, Setting]] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
METHODS: Final[dict[str, StreamMethod]] = {
    "vogn": StreamMethod("VOGN", _variational(VOGN), method_of("vogn").options),
    "vcl": StreamMethod("VCL", _variational(BayesByBackprop), method_of("bbb").options),
    "ewc": StreamMethod("EWC", _point, ADAM),
    "adam": StreamMethod("Adam", _point, ADAM),
    "joint": StreamMethod("Adam, all tasks together", _point, ADAM),
}


# What the loop of `train` does with them


def course_of(learner: Learner, training: Training, tasks: list[Task], seed: int) -> Course:
    return Course(learner, tasks, epochs=training.epochs, batch_size=training.batch_size, seed=seed)


def stream_of(
    training: Training, seed: int, folder: RunFolder, name: RunName, data_root: Path | None, ranks: Ranks
) -> "StreamWork":
    stream = _stream(training)
    splits = ranks.each(lambda: splits_of(training, data_root))
    tasks = tasks_of(stream, splits, seed)
    learner = learner_for(training, model_for(training, tasks), seed)
    course = course_of(learner, training, tasks, seed)
    title = f"{stream_method(training.method).title}, seed {seed}"
    return StreamWork(course, described_stream(training, seed, name), title, folder, ranks)


@final
class StreamWork(Work):
    """The tasks in turn; only the course and the time it took change."""

    def __init__(
        self, course: Course, asked: dict[str, Any], title: str, folder: RunFolder, ranks: Ranks
    ) -> None:
        self.course, self.title, self.ranks = course, title, ranks
        self.epochs = len(course.tasks) * course.settings["epochs"]
        self.steps_per_epoch = -(-total_steps(course) // self.epochs)
        self._asked, self._folder = asked, folder
        self._before, self._since = 0.0, time.monotonic()  # seconds before this process, and its start

    @property
    def epoch(self) -> int:
        return int(self.course.task * self.course.settings["epochs"] + self.course.epoch)

    @property
    def step(self) -> int:
        return self.course.steps

    def state_dict(self) -> dict[str, Any]:
        return {
            "asked": self._asked,
            "course": self.course.state_dict(),
            "seconds": self._seconds(),
            "processes": self.ranks.size,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        check_same_stream(self._folder.path, saved["asked"], self._asked)
        self.ranks.warn_of_another_number(saved.get("processes", 1))
        self.course.load_state_dict(saved["course"])
        self._before, self._since = saved["seconds"], time.monotonic()

    def begin(self, resumed: bool, drift: list[str]) -> None:
        """The checkpoints and the result say all there is."""

    def steps(self, watcher: Watcher) -> Iterator[bool]:
        course, scored = self.course, len(self.course.matrix)
        for _ in course.advance():
            watcher.stepped(course.steps)
            if len(course.matrix) > scored:
                scored = len(course.matrix)
                watcher.epoch_ended(
                    {"epoch": self.epoch, "accuracy": metrics.average_accuracy(course.matrix)}
                )
            yield False

    def finish(self) -> None:
        seconds = self._seconds()
        self.ranks.once(lambda: self._write(seconds))

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._since

    def _write(self, seconds: float) -> None:
        matrix = self.course.matrix
        result = {
            "format": FORMAT_VERSION,
            **self._asked,
            "matrix": matrix,
            "average_accuracies": metrics.average_accuracies(matrix),
            "average_accuracy": metrics.average_accuracy(matrix),
            "backward_transfer": metrics.backward_transfer(matrix),
            "forgetting": metrics.forgetting(matrix),
            "seconds": seconds,
            **provenance(),
        }
        write_signed(self._folder.stream_result, result)
        Checkpoints(self._folder.checkpoints).clear()


def total_steps(course: Course) -> int:
    """Of all tasks; joint training has the batches of the earlier tasks too."""
    size, joint = course.settings["batch_size"], course.learner.joint
    batches = [-(-len(task) // size) for task in course.tasks]
    a_task = [sum(batches[: k + 1]) if joint else batches[k] for k in range(len(batches))]
    return int(sum(a_task) * course.settings["epochs"])
