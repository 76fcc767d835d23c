"""The NLL of few samples without its bias, against the NLL of the distribution that they come from."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credo.calibration.objectives import Objective, OfClasses, OfLabels, OfValues

SETS, EXAMPLES = 3000, 20
NOISE = torch.tensor(0.3)
Drawn = tuple[Tensor, Tensor, Tensor]  # many small sets of samples, a large one, and the mean of each example


def drawn(samples: int, outputs: int, spread: float) -> Drawn:
    g = torch.Generator().manual_seed(0)
    centre = 1.5 * torch.randn(EXAMPLES, outputs, generator=g)
    sets = centre.repeat(SETS, 1) + spread * torch.randn(samples, SETS * EXAMPLES, outputs, generator=g)
    many = centre + spread * torch.randn(20_000, EXAMPLES, outputs, generator=g)
    return sets, many, centre


def mean_nll(objective: type, sets: Tensor, y: Tensor, unbiased: bool, *first: object) -> float:
    """Each set is as one more example."""
    made: Objective = objective(*first, unbiased)
    made.add((sets,), torch.cat([y] * (sets.shape[1] // len(y))))
    return made.nll(1.0)


@pytest.mark.parametrize("samples", [4, 10])
@pytest.mark.parametrize("spread", [0.8, 1.2])
def test_of_classes(samples: int, spread: float) -> None:
    sets, many, centre = drawn(samples, 3, spread)
    y = centre.argmax(1)
    truth = float(F.nll_loss(many.softmax(-1).mean(0).log(), y))
    judge(OfClasses, sets, y, truth, None)


@pytest.mark.parametrize("samples", [4, 10])
@pytest.mark.parametrize("spread", [0.8, 1.2])
def test_of_labels(samples: int, spread: float) -> None:
    sets, many, centre = drawn(samples, 2, spread)
    y = (centre > 0).float()
    truth = float(F.binary_cross_entropy(many.sigmoid().mean(0), y))
    judge(OfLabels, sets, y, truth)


@pytest.mark.parametrize("samples", [4, 10])
def test_of_values(samples: int) -> None:
    sets, _, centre = drawn(samples, 2, 0.4)
    y = centre + 0.5
    variance = 0.4**2 + float(NOISE)
    truth = 0.5 * (0.25 / variance + math.log(2 * math.pi * variance))
    judge(OfValues, sets, y, truth, NOISE)


def judge(objective: type, sets: Tensor, y: Tensor, truth: float, *first: object) -> None:
    plain, unbiased = (mean_nll(objective, sets, y, own, *first) for own in (False, True))
    assert plain > truth + 2e-3
    assert abs(unbiased - truth) < 2 / len(sets) * (plain - truth)  # what is left is smaller by 1/C


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_class_that_no_sample_knows_has_an_infinite_nll(unbiased: bool) -> None:
    objective = OfClasses(None, unbiased)
    objective.add((torch.tensor([[[-math.inf, 0.0]]]).expand(3, 1, 2),), torch.tensor([0]))
    assert objective.nll(1.0) == math.inf


def test_one_sample_has_no_spread_to_correct_by() -> None:
    sets, _, centre = drawn(1, 3, 0.5)
    y = centre.argmax(1)
    assert mean_nll(OfClasses, sets, y, True, None) == mean_nll(OfClasses, sets, y, False, None)
