"""Every layer of the table on the device: squares and gradients of the CPU, nothing mixed."""

import pytest

import credo
from tests.curvature.cases import CASES, Case
from tests.curvature.oracle import mean_loss, relative_error, squares_by_loop, target_for
from tests.device.emulated import Device

# Not of credo: models that make tensors on the CPU by themselves, and what torch has not for this device.
LIMITS = ("GPT-2 rows", "GPT-2 rows, T = M", "masked by a tensor, M rows", "RNN", "GRU ")


def is_possible(case: Case) -> bool:
    return not case.name.startswith(LIMITS)


POSSIBLE = [case for case in CASES if is_possible(case)]


def test_nearly_the_whole_table_is_here():
    assert len(POSSIBLE) >= len(CASES) - 12


@pytest.mark.parametrize("case", POSSIBLE, ids=lambda case: case.name)
def test_squares_are_those_of_the_loop_on_the_cpu(case: Case):
    model, x = case.build()
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    with Device() as seen:
        model, x, target = model.to("npu:0"), x.to("npu:0"), target.to("npu:0")
        with credo.capture(model) as stats:
            mean_loss(model(x), target).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert relative_error(stats.squares[p].cpu(), truth[name]) < 1e-10, name
    assert seen.launches
