"""Handwritten digits in permuted views, one after the other: Adam forgets, VOGN with yesterday's posterior does not.

python -m examples.continual_digits
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import credo
from credo.continual import Point, Task, Variational, annealed, learn


def stream(tasks: int) -> list[Task]:
    """Each task sees the same digits through its own permutation of the pixels, the first as they are."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(x), generator=generator)
    x, y = x[shuffled], y[shuffled]
    orders = [torch.arange(64)] + [torch.randperm(64, generator=generator) for _ in range(tasks - 1)]

    def view(order: Tensor) -> Task:
        return Task("digits", x[:1400, order], y[:1400], x[1400:, order], y[1400:])

    return [view(order) for order in orders]


def vogn(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.VOGN:
    """The prior is what the tasks so far have left; None before the first."""
    return credo.VOGN(
        model,
        lr=1e-2,
        data_size=data_size,
        prior=prior,
        seed=seed,
        initial_precision=1e3,  # fades as (1 − ema_rate)ᵗ, long before the task is over
        momentum=0.0,
        ema_rate=2e-2,
        damping=0.0,
        mc_samples=5,
        vectorized=True,
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def main(tasks: int = 4, epochs: int = 20) -> None:
    views = stream(tasks)
    learners = {
        "Adam": Point(network(), lambda parameters: torch.optim.Adam(parameters)),
        "VOGN": Variational(network(), vogn, annealing=annealed(0.1, hold=0.7), samples=30),
    }
    for name, learner in learners.items():
        matrix = learn(learner, views, epochs=epochs, batch_size=32)
        curve = " ".join(f"{value:.3f}" for value in credo.metrics.average_accuracies(matrix))
        print(
            f"{name}: average accuracy after each task {curve}, forgetting {credo.metrics.forgetting(matrix):.3f}"
        )


if __name__ == "__main__":
    main()
