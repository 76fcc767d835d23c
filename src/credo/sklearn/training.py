"""The loop of the estimators: epochs over minibatches, the best posterior by validation NLL, or all epochs."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from credo.optim import BayesianOptimizer
from credo.posterior import Posterior


class FitProblem(Protocol):
    """What is trained on: standardised features and targets."""

    def losses(self, rows: Tensor) -> Tensor:
        """−log p(y|x, w) of these examples, (M,), at the weights as they are."""

    def end_epoch(self) -> None:
        """Between two passes over the data."""


class FitBudget(NamedTuple):
    epochs: int
    batch_size: int
    patience: int  # epochs without a better validation NLL


class Trained(NamedTuple):
    posterior: Posterior
    epochs: int
    losses: list[float]  # mean training loss of each epoch
    validation: list[float]  # validation NLL after each epoch; empty without validation


def train(
    optimizer: BayesianOptimizer,
    problem: FitProblem,
    examples: int,
    order: numpy.random.Generator,
    budget: FitBudget,
    validate: Callable[[Posterior], float] | None,
) -> Trained:
    """Runs the epochs; with `validate` the posterior with the least validation NLL is the one that is kept."""
    losses: list[float] = []
    scores: list[float] = []
    best: Posterior | None = None
    for _ in range(budget.epochs):
        total = 0.0
        for rows in batches(examples, budget.batch_size, order):
            loss = optimizer.step(lambda rows=rows: problem.losses(rows))  # type: ignore[misc]
            assert loss is not None
            total += float(loss) * len(rows)
        problem.end_epoch()
        losses.append(total / examples)
        if validate is None:
            continue
        posterior = optimizer.posterior()
        scores.append(validate(posterior))
        if best is None or scores[-1] == min(scores):
            best = posterior
        elif len(scores) - 1 - scores.index(min(scores)) >= budget.patience:
            break
    return Trained(optimizer.posterior() if best is None else best, len(losses), losses, scores)


def batches(examples: int, batch_size: int, order: numpy.random.Generator) -> list[Tensor]:
    """All examples once, in a new order, in batches of sizes that differ by one at most."""
    number = max(1, round(examples / batch_size))
    return list(torch.from_numpy(order.permutation(examples)).tensor_split(number))
