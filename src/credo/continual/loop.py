"""The loop over tasks, and where it is: stopped anywhere, it goes on as if it had not been."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from credo.continual.learner import Annealing, Learner, annealed
from credo.continual.tasks import Task
from credo.distributed import data_share
from credo.errors import InvalidType, InvalidValue
from credo.metrics import accuracy
from credo.optim import arguments

Score: TypeAlias = Callable[[Tensor, Tensor], float]  # (predictions, targets) → what grows with quality
Watch: TypeAlias = Callable[["Course"], None]


def learn(
    learner: Learner,
    tasks: Sequence[Task],
    *,
    epochs: int,
    batch_size: int,
    seed: int = 0,
    score: Score = accuracy,
    watch: Watch | None = None,
) -> list[list[float]]:
    """Learns the tasks in turn; row i of the result has the scores on the tasks 0 … i after learning task i.

    `credo.metrics.average_accuracy`, `backward_transfer` and `forgetting` read it. With a process group, all ranks call
    this with the same tasks, and share every batch.
    """
    return Course(learner, tasks, epochs=epochs, batch_size=batch_size, seed=seed, score=score).run(watch)


@final
class Course:
    """`learn` as an object, for those who save and resume: `state_dict` between any two steps."""

    def __init__(
        self,
        learner: Learner,
        tasks: Sequence[Task],
        *,
        epochs: int,
        batch_size: int,
        seed: int = 0,
        score: Score = accuracy,
    ) -> None:
        if not tasks or not all(isinstance(task, Task) for task in tasks):
            raise InvalidType("tasks must be a sequence of credo.continual.Task, at least one")
        self.learner, self.tasks, self.score = learner, list(tasks), score
        self.settings: dict[str, Any] = {
            "tasks": [task.name for task in tasks],
            "epochs": arguments.whole("epochs", epochs, 1),
            "batch_size": arguments.whole("batch_size", batch_size, 1),
            "seed": arguments.seed(seed),
        }
        self.task, self.epoch, self.batch = 0, 0, 0  # of the next step
        self.steps = 0  # taken in all
        self.loss = float("nan")  # of the last step
        self.matrix: list[list[float]] = []
        self._share, self._shares = data_share()  # which part of every batch is this process's
        self._part: Task | None = None  # what is trained on of the task under way

    def run(self, watch: Watch | None = None) -> list[list[float]]:
        """Goes on to the end; `watch` is called after every step and every task, and may save."""
        for _ in self.advance():
            if watch is not None:
                watch(self)
        return self.matrix

    def advance(self) -> Iterator[None]:
        """Goes on to the end, and yields after every step and every task: the state is then whole."""
        while self.task < len(self.tasks):
            yield from self._train()
            self._close_task()
            yield

    def _train(self) -> Iterator[None]:
        part = self._part = self._part or self.learner.begin(self.tasks[self.task])
        epochs = self.settings["epochs"]
        while self.epoch < epochs:
            plan = self._plan(part)
            while self.batch < len(plan):
                source, rows = plan[self.batch]
                own = rows.tensor_split(self._shares)[self._share]
                progress = (self.epoch + self.batch / len(plan)) / epochs
                self.loss = self.learner.step(*source.batch(own), progress, source.head)
                self.batch, self.steps = self.batch + 1, self.steps + 1
                yield
            self.epoch, self.batch = self.epoch + 1, 0

    def _plan(self, part: Task) -> list[tuple[Task, Tensor]]:
        """The batches of this epoch, each of one task; the order follows from seed, task and epoch alone."""
        numbers = (self.settings["seed"] * 1009 + self.task) * 10_007 + self.epoch
        generator = torch.Generator().manual_seed(numbers % 2**63)
        sources = self.tasks[: self.task + 1] if self.learner.joint else [part]
        batches = [
            (task, rows) for task in sources for rows in task.shuffled(self.settings["batch_size"], generator)
        ]
        if len(sources) == 1:
            return batches
        return [batches[int(k)] for k in torch.randperm(len(batches), generator=generator)]

    def _close_task(self) -> None:
        assert self._part is not None
        self.learner.finish(self._part)
        self._part = None
        seen = self.tasks[: self.task + 1]
        self.matrix.append([self.score(self.learner.predict(task), task.test_targets) for task in seen])
        self.task, self.epoch = self.task + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is and all that the learner knows; plain numbers and tensors only."""
        return {
            "settings": dict(self.settings),
            "position": [self.task, self.epoch, self.batch, self.steps],
            "matrix": [list(row) for row in self.matrix],
            "learner": self.learner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict()`; raises for one of other tasks, epochs, batches or seed."""
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise InvalidValue(
                    f"the saved course has {name}={state['settings'].get(name)!r}, this one {value!r}; "
                    "resume with the settings it was started with"
                )
        self.task, self.epoch, self.batch, self.steps = state["position"]
        self.matrix = [list(row) for row in state["matrix"]]
        under_way = self.tasks[self.task] if self.task < len(self.tasks) else None
        self._part = self.learner.load_state_dict(state["learner"], under_way)


def remaining_distance(
    steps: int,
    *,
    lr: float,
    ema_rate: float,
    initial_precision: float,
    prior_precision: float = 1.0,
    annealing: Annealing | None = None,
) -> float:
    """The share of μ − μ₀, the mean's distance from the prior's, that is left after a task of so many steps.

        Π (1 − αₜP₀/Pₜ),  Pₜ = P₀ + max(P − P₀, 0)·Π(1 − βₜ),  both rates annealed

    This is VOGN (without momentum and damping) on a weight that the task's data do not reach, which only the prior
    moves. A mean that starts afresh must have come back there: what is left is forgotten, of all tasks before.
    Weights that the data do reach return more slowly, so let it be far below one in a hundred.
    """
    arguments.whole("steps", steps, 1)
    numbers = {"lr": lr, "initial_precision": initial_precision, "prior_precision": prior_precision}
    for name, value in numbers.items():
        arguments.number(name, value, 0, math.inf, open_low=True)
    arguments.number("ema_rate", ema_rate, 0, 1, open_low=True)
    rate_at = annealing or annealed()
    share, excess = 1.0, max(initial_precision / prior_precision - 1.0, 0.0)
    for step in range(steps):
        factor = rate_at(step / steps)
        excess *= 1 - ema_rate * factor
        share *= 1 - lr * factor / (1 + excess)
    return share


share_left = remaining_distance  # the name it had first
