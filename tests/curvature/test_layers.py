"""Every layer of the table against a loop over batches of one, with the kernels and in plain torch."""

import pytest
import torch

import credo
from tests.curvature.cases import CASES, Case
from tests.curvature.oracle import mean_loss, plain_backward, relative_error, squares_by_loop, target_for

pytestmark = pytest.mark.usefixtures("both_kernels")
EVERY = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_the_table_is_long_and_its_names_differ():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@EVERY
def test_squares_are_those_of_the_loop(case: Case):
    model, x = case.build()
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    with credo.capture(model) as stats:
        mean_loss(model(x), target).backward()
    assert stats.examples == len(x)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert parameter not in stats.squares
        else:
            assert relative_error(stats.squares[parameter], truth[name]) < 1e-10, name


@EVERY
def test_loss_is_bitwise_plain_and_gradients_are_to_rounding(case: Case):
    model, x = case.build()
    target = target_for(model, x)
    loss, grads = plain_backward(model, x, target)
    with credo.capture(model):
        watched = mean_loss(model(x), target)
        watched.backward()
    assert torch.equal(watched, loss)
    for name, parameter in model.named_parameters():
        if grads[name] is None:
            assert parameter.grad is None, name
        else:
            assert relative_error(parameter.grad, grads[name]) < 1e-12, name
            assert parameter.grad.shape == parameter.shape


@EVERY
def test_float32_is_close(case: Case):
    model, x = case.build()
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    model32, x32 = model.float(), x.float() if x.is_floating_point() else x
    if isinstance(getattr(model, "mask", None), torch.Tensor):
        model.mask = model.mask.float()
    with credo.capture(model32) as stats:
        mean_loss(model32(x32), target.float()).backward()
    for name, parameter in model32.named_parameters():
        if parameter.grad is not None:
            assert stats.squares[parameter].dtype == torch.float32
            assert relative_error(stats.squares[parameter].double(), truth[name]) < 1e-4, name
