"""What a step may launch, wait for, copy and keep: budgets that only go down."""

import pytest

import credo
from credo.models import ResNet18
from tests.device.networks import BATCH, step_of

# Launches at batch 128. Adam's own (foreach): 27, 40, 76, and 168 of ResNet-18.
LAUNCHES = {
    ("MLP", "VOGN"): 60,
    ("MLP", "OGN"): 57,
    ("MLP", "IVON"): 61,
    ("MLP", "BayesByBackprop"): 192,
    ("MLP", "KFAC"): 107,
    ("MLP", "NoisyKFAC"): 479,
    ("LeNet-5", "VOGN"): 90,
    ("LeNet-5", "OGN"): 87,
    ("LeNet-5", "IVON"): 74,
    ("LeNet-5", "BayesByBackprop"): 314,
    ("LeNet-5", "KFAC"): 172,
    ("transformer layer", "VOGN"): 200,
    ("transformer layer", "OGN"): 200,
    ("transformer layer", "IVON"): 121,
    ("LSTM", "VOGN"): 520,
    ("LSTM", "IVON"): 230,
    ("ResNet-18", "VOGN"): 1_100,
    ("ResNet-18", "OGN"): 1_100,
    ("ResNet-18", "IVON"): 290,
    ("ResNet-18", "BayesByBackprop"): 2_500,
}


@pytest.mark.parametrize(("network", "method"), LAUNCHES)
def test_a_step_keeps_to_its_budget(network, method):
    found = step_of(network, method)
    assert found.launches <= LAUNCHES[network, method], found.seen.launches.most_common(20)
    assert found.waits <= 1, found.seen.waits
    assert found.copies == 0, found.seen.copies


@pytest.mark.parametrize("network", ["MLP", "LeNet-5", "transformer layer", "ResNet-18"])
def test_ivon_launches_little_more_than_adam(network):
    assert step_of(network, "IVON").launches <= 3 * step_of(network, "Adam").launches + 30


@pytest.mark.parametrize("network", ["MLP", "LeNet-5"])
def test_launches_do_not_grow_with_the_batch(network):
    assert step_of(network, "VOGN", batch=4).launches == step_of(network, "VOGN", batch=128).launches


def test_a_larger_budget_needs_fewer_launches():
    usual = credo.kernels.scratch_bytes()
    try:
        counts = []
        for size in (32 << 20, 128 << 20, 512 << 20):
            credo.kernels.scratch_bytes(size)
            counts.append(step_of("ResNet-18", "VOGN", steps=3).launches)
    finally:
        credo.kernels.scratch_bytes(usual)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[2]


def test_memory_is_the_parameters_once_more_and_the_budget():
    """Beside Adam: the squares, which are as large as the gradients, a copy of the means, and scratch."""
    size = sum(p.numel() * p.element_size() for p in ResNet18(stem="cifar").parameters())
    adam, vogn = step_of("ResNet-18", "Adam"), step_of("ResNet-18", "VOGN")
    # State: VOGN keeps momentum, curvature, offset and the room for the means; Adam two moments.
    assert vogn.before - adam.before <= 1.02 * size
    squares, room, budget = size, size, credo.kernels.scratch_bytes()
    # VOGN's peak is in a backward pass through the last layers, Adam's is not: what they send back comes on top.
    sent_back = 3 * BATCH * 512 * 4 * 4 * 4
    assert vogn.peak - adam.peak <= squares + room + budget + sent_back
