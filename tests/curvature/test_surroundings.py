"""What the block lives beside: hooks, checkpoints, autocast, other dtypes and layouts, threads, other blocks."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import credo
from credo.errors import UnsupportedOperation
from tests.curvature.classification import assert_squares, batch, mlp, truth
from tests.curvature.oracle import relative_error


def test_user_hooks_run_as_in_plain_torch():
    net, (x, y) = mlp(), batch()

    def watch(seen: list):
        return [
            net[0].register_forward_hook(lambda m, i, o: seen.append(("forward", o.detach().clone()))),
            net[2].register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].clone()))),
            net[0].weight.register_hook(lambda g: seen.append(("weight", g.clone()))),
        ]

    def run(captured: bool) -> list:
        seen: list = []
        handles = watch(seen)
        if captured:
            with credo.capture(net):
                F.cross_entropy(net(x), y).backward()
        else:
            F.cross_entropy(net(x), y).backward()
        for handle in handles:
            handle.remove()
        return seen

    plain, watched = run(False), run(True)
    assert [kind for kind, _ in plain] == [kind for kind, _ in watched]
    for (_, a), (_, b) in zip(plain, watched, strict=True):
        assert relative_error(b, a) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    net, (x, y) = mlp(), batch()
    expected = truth(net, x, y)
    x = x.requires_grad_()
    with credo.capture(net) as stats:
        hidden = checkpoint(net[0], x, use_reentrant=reentrant)
        F.cross_entropy(checkpoint(net[2], hidden.relu(), use_reentrant=reentrant), y).backward()
    assert_squares(stats, net, expected)
    assert stats.examples == 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_in_two_checkpoints_is_summed_before_it_is_squared(reentrant):
    layer = nn.Linear(6, 6).double()
    net = nn.Sequential(layer, nn.Tanh(), layer)
    x, _ = batch()
    y = torch.zeros(10, dtype=torch.long)
    expected = truth(net, x, y)
    x = x.requires_grad_()
    with credo.capture(net) as stats:
        hidden = checkpoint(layer, x, use_reentrant=reentrant)
        F.cross_entropy(checkpoint(layer, hidden.tanh(), use_reentrant=reentrant), y).backward()
    assert_squares(stats, net, expected)


@pytest.mark.parametrize("first", [False, True])
def test_a_layer_in_a_reentrant_checkpoint_and_outside_is_refused(first):
    """Its second backward pass is not in the graph that was looked at: the uses cannot be added before squaring."""
    layer = nn.Linear(6, 6).double()
    x = batch()[0].requires_grad_()
    message = "'weight' is used both inside and outside a re-entrant checkpoint"
    with credo.capture(layer):
        hidden = checkpoint(layer, x, use_reentrant=True) if first else layer(x)
        hidden = hidden.tanh()
        out = layer(hidden) if first else checkpoint(layer, hidden, use_reentrant=True)
        with pytest.raises(UnsupportedOperation, match=message):
            out.mean().backward()


def test_autocast_accumulates_squares_in_float32():
    net, (x, y) = mlp().float(), batch()
    x = x.float()
    expected = truth(net, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(net(x), y)
    grads = torch.autograd.grad(plain, list(net.parameters()))
    with credo.capture(net) as stats, torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    assert torch.equal(loss, plain)
    assert_squares(stats, net, expected, bar=0.05)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert parameter.grad.dtype == stats.squares[parameter].dtype == torch.float32
        assert relative_error(parameter.grad, grad) < 0.02


def test_bfloat16_parameters_have_float32_squares():
    net, (x, y) = mlp().bfloat16(), batch()
    expected = truth(mlp(), x, y)
    with credo.capture(net) as stats:
        F.cross_entropy(net(x.bfloat16()), y).backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in net.parameters())
    assert all(s.dtype == torch.float32 for s in stats.squares.values())
    assert_squares(stats, net, expected, bar=0.1)


def test_squares_of_a_view_in_half_precision_do_not_vanish():
    """(1e-4)² is no number of float16."""
    x = torch.full((2, 3), 1e-4, dtype=torch.float16)
    weight = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float16))
    with credo.capture([weight], "sum") as stats:
        (x @ weight.t()).float().sum().backward()
    assert stats.squares[weight].dtype == torch.float32
    assert relative_error(stats.squares[weight], 2 * x[0].float().square().expand(4, 3)) < 1e-3


def test_channels_last():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(True), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 3)
    )
    net = net.double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 3, 7, 7, generator=generator, dtype=torch.float64), torch.arange(5) % 3
    expected = truth(net, x, y)
    net = net.to(memory_format=torch.channels_last)
    with credo.capture(net) as stats:
        F.cross_entropy(net(x.to(memory_format=torch.channels_last)), y).backward()
    assert_squares(stats, net, expected)


def test_another_thread_trains_another_model_undisturbed():
    net, other, (x, y) = mlp(), mlp(), batch()
    expected = truth(net, x, y)
    entered, trained, failures = threading.Event(), threading.Event(), []

    def train_other():
        entered.wait(10)
        try:
            F.cross_entropy(other(x), y).backward()
        except Exception as failure:
            failures.append(failure)
        trained.set()

    thread = threading.Thread(target=train_other)
    thread.start()
    with credo.capture(net) as stats:
        loss = F.cross_entropy(net(x), y)
        entered.set()
        trained.wait(10)
        loss.backward()
    thread.join()
    assert not failures
    assert_squares(stats, net, expected)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < 1e-12


def test_two_threads_may_capture_at_once():
    nets, (x, y) = [mlp(), mlp()], batch()
    expected, results = truth(nets[0], x, y), {}

    def run(k: int) -> None:
        for _ in range(20):
            with credo.capture(nets[k]) as stats:
                F.cross_entropy(nets[k](x), y).backward()
        results[k] = stats

    threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in (0, 1):
        assert_squares(results[k], nets[k], expected)


def test_two_models_in_nested_blocks():
    a, b, (x, y) = mlp(), mlp(), batch()
    expected = truth(a, x, y)
    with credo.capture(a) as outer, credo.capture(b) as inner:
        (F.cross_entropy(a(x), y) + F.cross_entropy(b(x), y)).backward()
    assert_squares(outer, a, expected)
    assert_squares(inner, b, expected)


W, B = torch.ones(4, 3), torch.ones(4)
STRANGERS = {
    "a given result": lambda: F.linear(torch.ones(5, 3), W, B, out=torch.empty(5, 4)),
    "nested": lambda: F.linear(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), W, B)[1],
    "traced": lambda: torch.fx.symbolic_trace(nn.Linear(3, 4).requires_grad_(False)).weight,
    "one row": lambda: F.linear(torch.ones(3), W, B),
    "no batch": lambda: F.conv2d(torch.ones(3, 5, 5), torch.ones(4, 3, 2, 2)),
    "by name": lambda: F.linear(input=torch.ones(5, 3), weight=W),
}


@pytest.mark.parametrize("call", STRANGERS.values(), ids=STRANGERS)
def test_layers_that_are_not_watched_are_torchs_own(call):
    """Whatever torch takes: no rule is asked."""
    with credo.capture(nn.Linear(3, 4)):
        inside = call()
    assert inside.shape == call().shape
