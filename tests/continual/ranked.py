"""What the ranks of the tests learn: short streams of tasks in float64. Results are plain numpy arrays and numbers."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor, nn

import credo
from credo.continual import Course, Learner, MultiHead, Point, Task, Variational
from credo.experiments.recipes import RECIPES
from credo.experiments.stopping import Terminated
from tests.continual import streams


def tasks(heads: bool) -> list[Task]:
    """90 examples in batches of 30 and of one: the last share of one rank is empty."""
    found = [streams.classification(k, head=f"head_{k}" if heads else None, n=122) for k in range(2)]
    return [
        Task(t.name, t.inputs.double(), t.targets, t.test_inputs.double(), t.test_targets, head=t.head)
        for t in found
    ]


def variational(method: str, **options: Any) -> Callable[[nn.Module], Learner]:
    def make(model: nn.Module, data_size: int, prior: Any, seed: int) -> Any:
        return getattr(credo, method)(model, data_size=data_size, prior=prior, seed=seed, **options)

    return lambda model: Variational(model, make, samples=3)


LEARNERS: dict[str, Callable[[nn.Module], Learner]] = {
    "vogn": variational("VOGN", lr=5e-3, damping=1e-2, shared_noise=True),
    "vogn, sharded": variational("VOGN", lr=5e-3, damping=1e-2, shared_noise=True, sharded=True),
    "vcl": variational("BayesByBackprop", shared_noise=True, local=False),
    "adam": lambda model: Point(model, streams.adam),
    "ewc": lambda model: Point(model, streams.adam, ewc=10.0),
    "joint": lambda model: Point(model, streams.adam, joint=True),
}


def with_heads() -> MultiHead:
    body = nn.Sequential(nn.Linear(streams.FEATURES, 12), nn.ReLU()).double()
    return MultiHead(body, lambda: nn.Linear(12, streams.CLASSES).double())


def learnt(rank: int, size: int, name: str, heads: bool) -> dict[str, Any]:
    model = with_heads() if heads else streams.network(seed=rank).double()
    course = Course(LEARNERS[name](model), tasks(heads), epochs=2, batch_size=30)
    losses: list[float] = []
    with counted(course.learner) as examples:
        matrix = course.run(lambda course: losses.append(course.loss))
    weights = {key: np.array(value.tolist()) for key, value in model.state_dict().items()}
    return {"matrix": matrix, "losses": losses, "weights": weights, "examples": examples}


@contextmanager
def counted(learner: Learner) -> Iterator[list[int]]:
    """How many examples each step of this process is on."""
    found: list[int] = []
    original = learner.step

    def step(inputs: Tensor, *rest: Any) -> float:
        found.append(len(inputs))
        return original(inputs, *rest)

    with patch.object(learner, "step", step):
        yield found


def run(rank: int, size: int, out: Path, row: str, stop_at: int | None = None) -> dict[str, Any]:
    """A row of a recipe; before step `stop_at` the last rank alone is told to stop."""
    from tests.experiments.test_streams import run_row, tiny

    recipe, steps = tiny(RECIPES["permuted-mnist"]), 0
    chosen = next(one for one in recipe.rows if one.name == row)
    original = Course._plan

    def plan(course: Course, part: Task) -> Any:
        nonlocal steps
        steps += 1
        if steps == stop_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(course, part)

    Course._plan = plan  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run_row(recipe, chosen, 0, out)
        return {**result, "warnings": [str(warning.message) for warning in caught]}
    except Terminated as ended:
        return {"ended": int(str(ended))}
    finally:
        Course._plan = original  # type: ignore[method-assign]


def command(rank: int, size: int, ports: list[int], out: Path) -> tuple[Any, str]:
    """`credo run permuted-mnist` in the environment that torchrun makes, on data of a few pixels."""
    from tests.experiments.ranked import commands
    from tests.experiments.test_streams import tiny

    small = {"permuted-mnist": tiny(RECIPES["permuted-mnist"])}
    line = ["run", "permuted-mnist", "--only", "adam", "--seeds", "2", "--out", str(out)]
    with patch.dict(RECIPES, small):
        (ended,) = commands(rank, size, ports, [line], "20")
    return ended
