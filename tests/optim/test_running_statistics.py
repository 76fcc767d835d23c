"""Running statistics of normalisation layers: averaged over the same steps as the mean."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo

STEPS = 40
AVERAGED: list[Callable[..., Any]] = [credo.VOGN, credo.OGN, credo.IVON]


class Recording(nn.BatchNorm1d):
    """BatchNorm that keeps the means of the batches it has seen in training, and its momentum then."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.seen: list[Tensor] = []
        self.momenta: list[float | None] = []

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.seen.append(input.detach().mean(0))
            self.momenta.append(self.momentum)
        return super().forward(input)


def network(**options: Any) -> tuple[nn.Module, Recording]:
    torch.manual_seed(0)
    norm = Recording(6, **options)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3)).double(), norm


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def replay(norm: Recording, weights: list[float]) -> Tensor:
    mean = torch.zeros(6, dtype=torch.float64)
    for batch, weight in zip(norm.seen, weights, strict=True):
        mean = (1 - weight) * mean + weight * batch
    return mean


@pytest.mark.parametrize("method", AVERAGED)
def test_they_are_averaged_with_the_weight_of_the_mean(method: Callable[..., Any]) -> None:
    model, norm = network(momentum=0.5)
    train(model, method(model, data_size=100))
    weights = [min(0.5, 9 / (t + 9)) for t in range(STEPS)]
    assert torch.allclose(norm.running_mean, replay(norm, weights), rtol=1e-12, atol=1e-14)
    assert norm.momentum == 0.5


def test_samples_of_one_step_share_its_weight() -> None:
    model, norm = network(momentum=0.5)
    train(model, credo.VOGN(model, data_size=100, mc_samples=3), 10)
    assert norm.momenta == [min(0.5, 9 / (t + 9) / 3) for t in range(10) for _ in range(3)]


@pytest.mark.parametrize("momentum", [0.01, None])
def test_those_that_remember_longer_are_left(momentum: float | None) -> None:
    model, norm = network(momentum=momentum)
    train(model, credo.VOGN(model, data_size=100))
    assert set(norm.momenta) == {momentum}


def test_without_an_average_nothing_changes() -> None:
    model, norm = network()
    train(model, credo.VOGN(model, data_size=100, averaging=0))
    assert set(norm.momenta) == {0.1}


def test_a_list_of_parameters_has_no_layers() -> None:
    model, norm = network()
    train(model, credo.VOGN(model.parameters(), data_size=100))
    assert set(norm.momenta) == {0.1}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_momentum_is_put_back_whatever_happens(error: type[BaseException]) -> None:
    model, norm = network()
    optimizer = credo.VOGN(model, data_size=100)
    train(model, optimizer, STEPS * 3)

    inside: list[float | None] = []

    def closure() -> Tensor:
        inside.append(norm.momentum)
        raise error

    with pytest.raises(error):
        optimizer.step(closure)
    assert norm.momentum == 0.1
    with pytest.raises(error), optimizer.sampled():
        closure()
    assert norm.momentum == 0.1
    assert inside == [9 / (3 * STEPS + 9)] * 2


def test_a_resumed_run_has_the_same_statistics() -> None:
    model, _ = network()
    optimizer = credo.VOGN(model, data_size=100)
    train(model, optimizer, STEPS * 3)
    other = copy.deepcopy(model)
    resumed = credo.VOGN(other, data_size=100)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 5)
    train(other, resumed, 5)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


def test_statistics_are_those_of_the_mean() -> None:
    """Beside one pass over the data at the mean; with torch's momentum they are those of the last ten batches."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2_000, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def distance(averaged: bool) -> float:
        model, norm = network()
        optimizer = credo.VOGN(model, data_size=len(x))
        order = torch.Generator().manual_seed(3)
        for _ in range(600):
            batch = torch.randint(0, len(x), (16,), generator=order)
            with optimizer.sampled():
                if not averaged:
                    norm.momentum = 0.1  # as torch has it
                F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        exact = model[0](x).detach()
        found = (norm.running_mean - exact.mean(0)) / exact.std(0)
        return float(found.square().mean().sqrt())

    assert distance(True) < 0.5 * distance(False)
