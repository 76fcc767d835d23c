"""What a plan must not overlook: other shapes and orders in the same memory, groups that go, buffers that change."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError
from tests.optim.test_plan import network, step, stepped
from tests.optim.trained import X, Y


def test_another_shape_in_the_same_memory_is_noticed():
    weight = nn.Parameter(torch.ones(2, 4))
    optimizer = credo.VOGN([weight], data_size=10)
    for _ in range(3):
        optimizer.step(lambda: torch.ones(5, 2) @ weight[:, 0])
    weight.data = weight.data.view(8)
    mean = weight.detach().clone()
    with optimizer.sampled():
        assert not torch.equal(weight, mean)
    assert torch.equal(weight, mean)


def test_a_view_of_a_state_in_another_order_is_noticed():
    found = []
    for forgets in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = credo.VOGN(model, data_size=100)
        for _ in range(3):
            optimizer.step(lambda model=model: F.cross_entropy(model(X[:, :3]), Y, reduction="none"))
        own = optimizer.state[model.weight]
        own["curvature"] = own["curvature"].t()
        if forgets:
            optimizer._lists.clear()
        optimizer.step(lambda model=model: F.cross_entropy(model(X[:, :3]), Y, reduction="none"))
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_a_removed_group_takes_its_state_along():
    model, optimizer = stepped(1)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("extra", extra)]})
    optimizer.step(lambda: F.cross_entropy(model(X) + extra, Y, reduction="none"))
    optimizer.step(lambda: F.cross_entropy(model(X) + extra, Y, reduction="none"))
    state = weakref.ref(optimizer.state[extra]["curvature"])
    optimizer.param_groups.pop()
    del optimizer.state[extra]
    model[0].weight.data = model[0].weight.data.clone()  # so that plans are made again
    step(model, optimizer)
    assert state() is None


def test_every_group_is_a_sample_inside_a_block(both_kernels):
    model = network()
    optimizer = credo.VOGN(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], data_size=9
    )
    for _ in range(2):
        step(model, optimizer)
    means = [p.detach().clone() for p in model.parameters()]
    with optimizer.sampled():
        assert not any(torch.equal(p, mean) for p, mean in zip(model.parameters(), means, strict=True))
    assert all(torch.equal(p, mean) for p, mean in zip(model.parameters(), means, strict=True))
    seen = []

    def closure():
        seen.append([p.detach().clone() for p in model.parameters()])
        return F.cross_entropy(model(X), Y, reduction="none")

    optimizer.step(closure)
    assert not any(torch.equal(p, mean) for p, mean in zip(seen[0], means, strict=True))


class Turned(nn.Module):
    """A weight that a buffer turns: a computation with parameters alone, as long as the buffer is known."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("turn", torch.eye(3))

    def forward(self, x):
        return nn.functional.linear(x, self.weight @ self.turn)


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_buffer_that_was_replaced_is_known_in_the_next_step(forgetful):
    """Were it not, the rows of the turned weight would count as examples."""
    model, x = Turned(), torch.eye(3)
    optimizer = credo.VOGN(model, data_size=10, lr=0.0, ema_rate=1.0)

    def closure():
        return model(x).sum(1)

    for _ in range(2):
        optimizer.step(closure)
    model.turn = 2 * torch.eye(3)
    if forgetful:
        optimizer._watched = None
    optimizer.step(closure)
    # The gradient of example i is 2 in column i, and the mean of squares is over three examples.
    torch.testing.assert_close(optimizer.curvature()["weight"], torch.full((2, 3), 4 / 3))


def test_other_parameters_are_watched_from_the_next_step_on():
    model, optimizer = stepped(2)
    first = optimizer._watched
    step(model, optimizer)
    assert optimizer._watched is first
    model[0].bias.requires_grad_(False)
    step(model, optimizer)
    assert id(model[0].bias) not in optimizer._watched.watched
    assert id(model[0].weight) in optimizer._watched.watched


def grow_the_weight(weight: nn.Parameter, optimizer: credo.VOGN) -> None:
    weight.data, weight.grad = torch.zeros(2, 400), None


def shrink_its_state(weight: nn.Parameter, optimizer: credo.VOGN) -> None:
    optimizer.state[weight]["curvature"] = torch.ones(1)


@pytest.mark.parametrize("change", [grow_the_weight, shrink_its_state])
def test_a_state_of_another_size_is_refused(change):
    """A kernel would write beyond it."""
    weight = nn.Parameter(torch.ones(2, 4))
    optimizer = credo.VOGN([("weight", weight)], data_size=10)
    for _ in range(2):
        optimizer.step(lambda: torch.ones(5, 2) @ weight[:, 0])
    change(weight, optimizer)
    mean = weight.detach().clone()
    with pytest.raises(CallOrderError, match=r"'weight' has shape .* was replaced"):
        optimizer.step(lambda: torch.ones(5, 2) @ weight[:, 0])
    assert torch.equal(weight, mean)


def test_a_weight_that_grows_before_its_first_step_is_refused():
    weight = nn.Parameter(torch.ones(2, 4))
    optimizer = credo.VOGN([("weight", weight)], data_size=10)
    with optimizer.sampled():
        (torch.ones(5, 2) @ weight[:, 0]).mean().backward()
    weight.data = torch.zeros(2, 400)
    with pytest.raises(CallOrderError, match="squares"):
        optimizer.step()
    assert not optimizer.state[weight]
