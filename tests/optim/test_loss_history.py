"""The rule by which losses stand still or diverge: on courses that are made up, with noise of several sizes."""

import pytest
import torch
from torch import Tensor

from credo.optim import loss_history


def said(losses: Tensor, fresh: bool = True) -> bool:
    seen = loss_history.LossHistory(fresh)
    return any(seen.add(part) or seen.stalled() for part in losses.double().view(-1, 50).tolist())


STEPS = torch.arange(5000.0)
NOISE = torch.randn(50, 5000, generator=torch.Generator().manual_seed(0))
LEARNING = {
    "slow, under large noise": 2.3 * (0.8 + 0.2 * torch.exp(-STEPS / 1500)),
    "fast": 0.3 + 2 * torch.exp(-STEPS / 30),
    "in three steps": 0.5 + 0.5 * torch.exp(-STEPS),
    "late": 2.3 - 1.5 * ((STEPS - 300) / 1000).clamp(0, 1),
    "to less than nothing": -3 + 4 * torch.exp(-STEPS / 500),
}


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0])
def test_noisy_losses_that_fall_are_not_taken_for_still(name, spread):
    wrong = sum(
        said(LEARNING[name] + spread * torch.randn(5000, generator=torch.Generator().manual_seed(seed)))
        for seed in range(50)
    )
    assert wrong <= 1  # where a fall of half of the noise has happened in three of five hundred steps


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_losses_that_stand_still_are_told(spread):
    told = sum(
        said(2.3 + spread * torch.randn(5000, generator=torch.Generator().manual_seed(seed)))
        for seed in range(50)
    )
    assert told >= 45
    assert not said(torch.full((5000,), 2.3), fresh=False)


def test_divergence_is_measured_at_the_median_of_the_first_losses():
    seen = loss_history.LossHistory(fresh=True)
    seen.add([1e-9, *[1.0] * 49])  # one lucky batch
    assert seen.diverged() is None
    seen.add([2e3] * 50)
    assert seen.diverged() == (1.0, 2e3)


def judged(losses: Tensor) -> tuple[float, float] | None:
    seen, found = loss_history.LossHistory(fresh=True), None
    for part in losses.double().view(-1, 50).tolist():
        seen.add(part)
        found = found or seen.diverged()
        seen.stalled()
    return found


def test_a_divergence_in_the_first_step_is_told_by_the_first_loss():
    """All losses but the first are huge: there is nothing else that they have grown from."""
    rough = 1e6 * (1 + 0.5 * torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    rough[::7] = 0.0  # a minibatch of the one class that is still predicted
    found = judged(torch.cat([torch.tensor([1.1]), rough[1:]]))
    assert found is not None
    assert found[0] == pytest.approx(1.1)
    assert found[1] > 5e5


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(
            torch.cat([torch.tensor([1e-6]), torch.full((999,), 0.3)]), id="pretrained, under noise"
        ),
        pytest.param(torch.cat([torch.tensor([1e-6]), torch.full((999,), 3.0)]), id="pretrained, much noise"),
        pytest.param(900 * torch.exp(-torch.arange(1000) / 900), id="large losses that fall"),
        pytest.param(
            torch.cat([torch.full((500,), 400.0), torch.full((500,), 0.5)]), id="a bad start that is over"
        ),
        pytest.param(
            torch.where(torch.arange(1000) % 5 > 2, 500.0, 1.0),
            id="many outliers",
        ),
    ],
)
def test_what_is_no_divergence(losses):
    assert judged(losses) is None


def test_losses_of_zero_stand_still():
    assert said(torch.zeros(5000))
    assert not said(torch.cat([torch.ones(3), torch.zeros(4997)]))
