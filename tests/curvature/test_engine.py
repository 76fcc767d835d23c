"""All ways to ask for a backward pass: the squares are those of the loss, and what torch refuses it still refuses."""

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.curvature.backward_calls import AnyCall, PlainBackward, read_engine_call
from credo.errors import UnsupportedOperation
from tests.curvature.classification import assert_squares, batch, mlp, truth

WAYS = {
    "plain": lambda loss, net: loss.backward(),
    "by name": lambda loss, net: torch.Tensor.backward(self=loss),
    "of one element": lambda loss, net: loss.unsqueeze(0).backward(),
    "weighed": lambda loss, net: (loss / 2).backward(torch.tensor(2.0).double()),
    "weighed by name": lambda loss, net: (loss / 2).backward(gradient=torch.tensor(2.0).double()),
    "retained": lambda loss, net: loss.backward(retain_graph=True),
    "to some": lambda loss, net: loss.backward(inputs=list(net.parameters())),
    "function": lambda loss, net: torch.autograd.backward(loss),
    "two roots": lambda loss, net: torch.autograd.backward([loss / 2, loss / 2]),
    "returned": lambda loss, net: torch.autograd.grad(loss, list(net.parameters())),
    "of a subclass": lambda loss, net: loss.as_subclass(OfAUser).backward(),
}


class OfAUser(torch.Tensor):
    """A tensor with its own class."""


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_start_a_backward_pass_gives_the_squares(way):
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    with credo.capture(net) as stats:
        way(F.cross_entropy(net(x), y), net)
    assert_squares(stats, net, expected)
    assert stats.examples == len(x)


def test_a_weight_on_the_loss_weighs_gradients_and_squares():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    for gradient in ({"gradient": torch.tensor(3.0).double()}, {}):
        net.zero_grad()
        with credo.capture(net) as stats:
            (F.cross_entropy(net(x), y) * (1 if gradient else 3)).backward(**gradient)
        assert_squares(stats, net, {name: 9 * square for name, square in expected.items()})


def test_a_graph_is_kept_only_if_asked_to():
    net, (x, y) = mlp(), batch()
    with credo.capture(net):
        loss = F.cross_entropy(net(x), y) / 3
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("ask", [torch.Tensor.backward, torch.autograd.backward], ids=["method", "function"])
def test_gradients_of_gradients_are_refused(ask):
    net, (x, y) = mlp(), batch()
    with pytest.raises(UnsupportedOperation, match="create_graph"), credo.capture(net):
        ask(F.cross_entropy(net(x), y), create_graph=True)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda loss: loss.expand(3), "scalar outputs"),
        (lambda loss: loss.detach(), "does not require grad"),
    ],
    ids=["three numbers", "no graph"],
)
def test_what_torch_refuses_it_refuses_inside_a_block_too(spoil, words):
    net, (x, y) = mlp(), batch()
    with pytest.raises(RuntimeError, match=words), credo.capture(net):
        spoil(F.cross_entropy(net(x), y)).backward()


def test_what_is_a_plain_backward_pass():
    """It goes to torch's engine without torch's questions."""
    loss = torch.ones((), requires_grad=True) * 2
    none = {"gradient": None, "retain_graph": None, "create_graph": False, "inputs": None}
    assert isinstance(read_engine_call(torch.Tensor.backward, (loss,), none), PlainBackward)
    for other in ({"gradient": loss.detach()}, {"inputs": [loss]}, {"create_graph": True}):
        assert isinstance(read_engine_call(torch.Tensor.backward, (loss,), none | other), AnyCall)
