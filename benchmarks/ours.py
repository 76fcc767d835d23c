"""Plain torch and credo."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE, Absent, Contender, Running

Kernels = Callable[[], AbstractContextManager[object]]


def plain(problem: Problem) -> Running:
    def step() -> None:
        problem.model.zero_grad()
        problem.loss().backward()

    return Running(step)


def adam(problem: Problem, **options: Any) -> Running:
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=LEARNING_RATE, **options)

    def step() -> None:
        optimizer.zero_grad()
        problem.loss().backward()
        optimizer.step()

    return Running(step)


def engine(problem: Problem, kernels: str) -> Running:
    """Σg and Σg² of one batch: a forward and a backward inside `credo.capture`."""
    capture, switch = credo_attribute("capture"), kernel_switch(kernels)
    kept: list[Any] = []

    def step() -> None:
        kept.clear()  # or the squares of the last step would count as memory of this one
        problem.model.zero_grad()
        with switch(), capture(problem.model) as stats:
            problem.loss().backward()
        kept.append(stats)

    def squares() -> dict[str, Tensor]:
        return {name: kept[0].squares[p] for name, p in problem.model.named_parameters()}

    return Running(step, squares)


def optimiser(problem: Problem, name: str, kernels: str) -> Running:
    """A full step: sample, forward, backward, update."""
    switch = kernel_switch(kernels)
    optimizer = credo_attribute(name)(problem.model, lr=LEARNING_RATE, data_size=DATA_SIZE)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    def step() -> None:
        with switch():
            optimizer.step(closure)

    return Running(step)


def credo_attribute(name: str) -> Any:
    import credo

    if not hasattr(credo, name):
        raise Absent(f"credo.{name} is not there yet")
    return getattr(credo, name)


def kernel_switch(kernels: str) -> Kernels:
    """Two rows that ran the same code would be no comparison, so "on" insists on the kernels."""
    module = credo_attribute("kernels")
    if kernels == "off":
        return partial(module.forced, "off")
    if not module.status().enabled:
        raise Absent(f"no kernels: {module.status().reason}")
    return nullcontext


OURS = [
    Contender("plain", "forward + backward", plain),
    Contender("adam", "torch Adam", adam),
    Contender("adam-fused", "torch Adam, fused", partial(adam, fused=True)),
    Contender("engine", "credo Σg²", partial(engine, kernels="on")),
    Contender("engine-pure", "credo Σg², kernels off", partial(engine, kernels="off")),
    Contender("vogn", "credo VOGN", partial(optimiser, name="VOGN", kernels="on")),
    Contender("bbb", "credo BayesByBackprop", partial(optimiser, name="BayesByBackprop", kernels="on")),
    Contender("credo-ivon", "credo IVON", partial(optimiser, name="IVON", kernels="on")),
    Contender("vogn-pure", "credo VOGN, kernels off", partial(optimiser, name="VOGN", kernels="off")),
]
