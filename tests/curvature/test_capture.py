"""How the block behaves: reductions, micro-batches, what it leaves alone, and what it lives beside."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import credo
from tests.curvature.oracle import relative_error


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def batch(size: int = 10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def truth(net: nn.Module, x, y) -> dict[str, torch.Tensor]:
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        for name, grad in zip(sums, grads, strict=True):
            sums[name] += grad.square()
    return sums


def assert_squares(stats, net, expected, bar=1e-10):
    for name, parameter in net.named_parameters():
        assert relative_error(stats.squares[parameter].to(expected[name].dtype), expected[name]) < bar, name


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
        modules = [(sorted(m.__dict__), len(m._forward_hooks), len(m._backward_hooks)) for m in net.modules()]
        return [
            modules,
            [
                sorted(p.__dict__) + [p._backward_hooks, p._post_accumulate_grad_hooks]
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
