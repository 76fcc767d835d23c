"""Linear regression with orthogonal designs, where the answer is known: two tasks in turn against both at once."""

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import Task, Variational, annealed, learn

TRUTH = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
PRECISIONS = (  # what each task knows of each weight; the fourth is unknown to the first task
    torch.tensor([400.0, 40.0, 4.0, 0.0], dtype=torch.float64),
    torch.tensor([10.0, 40.0, 800.0, 100.0], dtype=torch.float64),
)
N = 1500


def task(number: int) -> Task:
    """XᵀX = diag(PRECISIONS[number]); the noise has mean square one and is orthogonal to X."""
    generator = torch.Generator().manual_seed(number)
    basis = torch.linalg.qr(torch.randn(N, 4, generator=generator, dtype=torch.float64))[0]
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    noise -= basis @ (basis.T @ noise)
    noise *= (N / noise.square().sum()).sqrt()
    x = basis * PRECISIONS[number].sqrt()
    y = (x @ TRUTH + noise)[:, None]
    return Task(f"design_{number}", x, y, x, y)


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def minus_rmse(outputs: Tensor, targets: Tensor) -> float:
    return -(outputs - targets).square().mean().sqrt().item()


def joint_posterior(tasks: list[Task], prior_precision: float) -> tuple[Tensor, Tensor]:
    """Mean and precisions in closed form, from all data at once; a standard prior mean of zero."""
    precision = sum(t.inputs.T @ t.inputs for t in tasks) + prior_precision * torch.eye(
        4, dtype=torch.float64
    )
    moment = sum(t.inputs.T @ t.targets[:, 0] for t in tasks)
    return torch.linalg.solve(precision, moment), precision.diag()


def vogn(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.VOGN:
    return credo.VOGN(
        model,
        0.1,
        data_size=data_size,
        prior=prior,
        seed=seed,
        momentum=0.0,
        ema_rate=0.05,
        damping=0.0,
        mc_samples=2,
    )


def bbb(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.BayesByBackprop:
    return credo.BayesByBackprop(
        model, 0.05, data_size=data_size, prior=prior, seed=seed, initial_log_variance=-6.0
    )


@pytest.mark.parametrize("start", ["fresh", "mean"])
@pytest.mark.parametrize(("make", "within"), [(vogn, 0.15), (bbb, 0.05)], ids=["VOGN", "VCL"])
def test_two_tasks_in_turn_are_both_at_once(make, within, start):
    tasks = [task(0), task(1)]
    learner = Variational(
        nn.Linear(4, 1, bias=False).double(),
        make,
        loss=half_squares,
        kind="regression",
        start=start,
        annealing=annealed(0.01, hold=0.5),
    )
    matrix = learn(learner, tasks, epochs=400, batch_size=N, score=minus_rmse)
    mean, precision = joint_posterior(tasks, 1.0)
    found, variance = learner.posterior.mean["weight"][0], learner.posterior.variance["weight"][0]
    assert ((found - mean) * precision.sqrt()).abs().max() < 0.5
    torch.testing.assert_close(1 / variance, precision, rtol=within, atol=0)
    assert matrix[1] == pytest.approx([-1.0, -1.0], abs=0.01)  # the noise is all that is left


def test_the_tasks_need_each_other():
    """The bar can fail: the second task alone is far from the joint mean."""
    mean, precision = joint_posterior([task(0), task(1)], 1.0)
    alone, _ = joint_posterior([task(1)], 1.0)
    assert ((alone - mean) * precision.sqrt()).abs().max() > 0.5
