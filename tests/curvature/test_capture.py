"""How the block behaves: reductions, micro-batches, what counts as an example, and what it leaves alone."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import credo
from credo.curvature.intercept import Interception
from credo.errors import CallOrderError, UnsupportedOperation
from tests.curvature.classification import assert_squares, batch, mlp, truth
from tests.curvature.oracle import relative_error


def test_mean_and_sum_give_the_squares_of_each_examples_own_loss():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    for reduction in ("mean", "sum"):
        with credo.capture(net, reduction) as stats:
            F.cross_entropy(net(x), y, reduction=reduction).backward()
        assert_squares(stats, net, expected)
        assert stats.examples == 10


def test_micro_batches_add_up_to_the_whole_batch():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    net(x).sum().backward()
    plain = F.cross_entropy(net(x), y)
    grads = torch.autograd.grad(plain, list(net.parameters()))
    net.zero_grad()
    with credo.capture(net) as stats:
        for part in (slice(0, 3), slice(3, 4), slice(4, 10)):
            (F.cross_entropy(net(x[part]), y[part], reduction="sum") / 10).backward()
    assert stats.examples == 10
    assert_squares(stats, net, expected)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert relative_error(parameter.grad, grad) < 1e-12


def test_a_declared_loss_scale_is_divided_out():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    with credo.capture(net, scale=1024.0) as stats:
        (1024.0 * F.cross_entropy(net(x), y)).backward()
    assert_squares(stats, net, expected)


def test_gradients_may_be_changed_in_place(both_kernels):
    """As clipping and optimisers do, whatever memory they share with the squares."""
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    with credo.capture(net) as stats:
        F.cross_entropy(net(x), y).backward()
    for parameter in net.parameters():
        assert parameter.grad.stride() == parameter.stride()
        parameter.grad.mul_(3.0)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
    net.zero_grad(set_to_none=False)
    assert_squares(stats, net, expected)


def test_a_parameter_frozen_in_the_block_has_no_squares(both_kernels):
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    with credo.capture(net) as stats:
        net[0].weight.requires_grad_(False)
        F.cross_entropy(net(x), y).backward()
    assert net[0].weight.grad is None
    assert net[0].weight not in stats.squares
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert relative_error(stats.squares[parameter], expected[name]) < 1e-10


def test_gradients_accumulate_as_torchs_do():
    net, (x, y) = mlp(), batch()
    F.cross_entropy(net(x), y).backward()
    once = [p.grad.clone() for p in net.parameters()]
    with credo.capture(net):
        F.cross_entropy(net(x), y).backward()
    for parameter, grad in zip(net.parameters(), once, strict=True):
        assert relative_error(parameter.grad, 2 * grad) < 1e-12


def test_squared_gradients_leaves_grad_alone_and_gives_zeros_for_the_unused():
    net, (x, y) = mlp(), batch()
    model = nn.ModuleDict({"net": net, "idle": nn.Linear(2, 2)})
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    squares = credo.squared_gradients(model, lambda: F.cross_entropy(net(x), y))
    expected = truth(net, x, y)
    assert all((p.grad == 7.0).all() for p in net.parameters())
    assert all(p.grad is None for p in model["idle"].parameters())
    assert list(squares) == [name for name, _ in model.named_parameters()]
    for name, value in expected.items():
        assert relative_error(squares[f"net.{name}"], value) < 1e-10
    assert (squares["idle.weight"] == 0).all()


def test_parameters_and_named_parameters_are_as_good_as_the_module():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    for parameters in (net.parameters(), net.named_parameters(), [net[0].weight, net[2].bias]):
        with credo.capture(parameters) as stats:
            F.cross_entropy(net(x), y).backward()
        for name, parameter in net.named_parameters():
            if parameter in stats.squares:
                assert relative_error(stats.squares[parameter], expected[name]) < 1e-10
        assert len(stats.squares) in (2, 4)


def test_nothing_is_left_behind():
    net, (x, y) = mlp(), batch()

    def traces() -> list:
        return [
            [(sorted(m.__dict__), len(m._forward_hooks), len(m._backward_hooks)) for m in net.modules()],
            [
                (sorted(p.__dict__), p._backward_hooks, p._post_accumulate_grad_hooks)
                for p in net.parameters()
            ],
        ]

    before, patched = traces(), [F.linear, torch.Tensor.backward, torch.autograd.backward]
    state = torch.get_rng_state()
    for fails in (False, True):
        try:
            with credo.capture(net):
                F.cross_entropy(net(x), y).backward()
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert traces() == before
        assert torch.overrides._get_current_function_mode() is None
        assert [F.linear, torch.Tensor.backward, torch.autograd.backward] == patched
    assert torch.equal(torch.get_rng_state(), state)


def test_activations_die_with_the_loss():
    net, (x, y) = mlp(), batch()
    with credo.capture(net) as stats:
        hidden = net[0](x)
        ghost = weakref.ref(hidden)
        loss = F.cross_entropy(net[2](net[1](hidden)), y)
        loss.backward()
        del hidden, loss
        gc.collect()
        assert ghost() is None
    assert stats.examples == 10


def test_a_graph_may_be_traversed_twice():
    layer = nn.Linear(6, 6).double()
    net = nn.Sequential(layer, nn.Tanh(), layer)
    x, _ = batch()
    expected = truth(net, x, torch.zeros(10, dtype=torch.long))
    with credo.capture(net, "sum") as stats:
        loss = F.cross_entropy(net(x), torch.zeros(10, dtype=torch.long), reduction="sum")
        loss.backward(retain_graph=True)
        loss.backward()
    assert stats.examples == 20
    assert_squares(stats, net, {name: 2 * value for name, value in expected.items()})


def test_gradients_of_inputs_do_not_count():
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    x = x.requires_grad_()
    with credo.capture(net) as stats:
        torch.autograd.grad(net(x).sum(), x)
        F.cross_entropy(net(x), y).backward(inputs=list(net.parameters()))
    assert_squares(stats, net, expected)
    assert stats.examples == 10


def test_a_block_that_has_ended_does_not_begin_again():
    """Its squares would be those of both, as of micro-batches."""
    net, (x, y) = mlp(), batch()
    block = credo.capture(net)
    with block as stats:
        F.cross_entropy(net(x), y).backward()
    with pytest.raises(CallOrderError, match="cannot begin again"), block:
        pass
    assert stats.examples == 10
    assert torch.overrides._get_current_function_mode() is None


def test_class_weights_ignore_index_and_label_smoothing():
    """A weighted mean divides by the weights' sum, so the declared reduction is the sum."""
    net, (x, y) = mlp(), batch()
    y[3] = -100
    options = {"weight": torch.tensor([1.0, 2.0, 0.5]).double(), "ignore_index": -100, "label_smoothing": 0.1}
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(len(x)):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1], reduction="sum", **options)
        for name, grad in zip(sums, torch.autograd.grad(loss, list(net.parameters())), strict=True):
            sums[name] += grad.square()
    with credo.capture(net, "sum") as stats:
        F.cross_entropy(net(x), y, reduction="sum", **options).backward()
    assert_squares(stats, net, sums)


def test_dropout_uses_one_mask_for_gradient_and_square():
    net, (x, _) = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).double(), batch()
    with credo.capture(net, "sum") as stats, torch.random.fork_rng():
        torch.manual_seed(3)
        out = net(x)
        out.sum().backward()
    kept = (out != 0).double() * 2  # (M, 4)
    assert relative_error(stats.squares[net[0].bias], kept.square().sum(0)) < 1e-12
    assert relative_error(stats.squares[net[0].weight], kept.square().T @ x.square()) < 1e-12


def test_rows_of_one_example_merged_by_declaration():
    layer = nn.Linear(4, 3).double()
    x = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = credo.squared_gradients(layer, lambda: layer(x).square().sum((1, 2)).mean())
    rows = x.flatten(0, 1).clone()
    with credo.capture(layer, examples=5) as stats:
        (layer(rows).square().sum() / 5).backward()
    assert stats.examples == 5
    assert relative_error(stats.squares[layer.weight], expected["weight"]) < 1e-12


def test_several_roots_all_go_back():
    net, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    losses = [lambda: net(x).square().mean(), lambda: 3 * net(x).mean()]
    expected = torch.autograd.grad(sum(loss() for loss in losses), net.weight)[0]
    for together in (False, True):
        net.zero_grad()
        with credo.capture(net):
            roots = [loss() for loss in losses]
            torch.autograd.backward([sum(roots)] if together else roots)
        torch.testing.assert_close(net.weight.grad, expected)


def test_an_edge_of_the_graph_as_a_root_is_refused():
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
    with credo.capture(net):
        one, other = net(x).square().mean(), net(x).mean()
        edge = torch.autograd.graph.get_gradient_edge(other)
        with pytest.raises(UnsupportedOperation, match="GradientEdge"):
            torch.autograd.backward([one, edge])
        with pytest.raises(CallOrderError, match="could not be seen"):  # torch shows it to nobody
            torch.autograd.backward(edge)
    assert net.weight.grad is None


def test_an_interrupt_while_a_block_opens_leaves_no_eyes_open(monkeypatch):
    def interrupted(self):
        TorchFunctionMode.__enter__(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Interception, "__enter__", interrupted)
    before = torch._C._len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt), credo.capture(nn.Linear(2, 2)):
        pass
    assert torch._C._len_torch_function_stack() == before
