"""Fewer samples for convolutions than for linear layers, one after the other and at once, against both by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import credo
from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from tests.optim.replay import snapshot
from tests.optim.test_bayes_by_backprop import X, Y, network, noise_of
from tests.optim.trained import assert_unchanged, learned

WEIGHT = 1 / 50  # τ/N


def objective(mean: dict, log_variance: dict, local: bool, draw: int, of_convolution: int) -> Tensor:
    """Mean loss + KL/N by hand; the convolution has the noise of another draw than the linear layers."""
    index = {name: k for k, name in enumerate(mean)}
    variance = {n: v.exp() for n, v in log_variance.items()}

    def layer(function, x: Tensor, name: str, draw: int) -> Tensor:
        w, b = f"{name}.weight", f"{name}.bias"
        if local:
            spread = function(x * x, variance[w], variance[b])
            epsilon = noise_of(spread.shape, 0, draw, 2 * index[w] + 1)
            return function(x, mean[w], mean[b]) + spread.sqrt() * epsilon
        sds = {n: variance[n].sqrt() * noise_of(mean[n].shape, 0, draw, 2 * index[n]) for n in (w, b)}
        return function(x, mean[w] + sds[w], mean[b] + sds[b])

    hidden = torch.tanh(layer(F.conv1d, X, "0", of_convolution)).flatten(1)
    logits = layer(F.linear, torch.tanh(layer(F.linear, hidden, "3", draw)), "5", draw)
    kl = sum(0.5 * (variance[n] - 1 - log_variance[n] + mean[n] ** 2).sum() for n in mean)
    return F.cross_entropy(logits, Y) + WEIGHT * kl


@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("samples", "of_convolutions"), [(4, 1), (6, 2), (6, 3), (3, 3), (3, None)])
def test_the_gradient_is_that_of_the_mean_over_the_samples(
    samples, of_convolutions, local, vectorized, both_kernels
):
    model = network()
    mean = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    log_variance = {n: torch.full_like(p, -2.0).requires_grad_() for n, p in mean.items()}
    sharing = samples // (of_convolutions or samples)
    draws = [(k, k - k % sharing) for k in range(samples)]
    total = sum(objective(mean, log_variance, local, *draw) for draw in draws) / samples
    total.backward()
    options = {"mc_samples": samples, "convolution_samples": of_convolutions, "vectorized": vectorized}
    optimizer = credo.BayesByBackprop(  # SGD with rate 1 moves by the gradient
        model,
        1.0,
        data_size=50,
        inner=torch.optim.SGD,
        initial_log_variance=-2.0,
        local=local,
        **options,
    )
    loss = optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    with torch.no_grad():
        kl = credo.BayesByBackprop(network(), data_size=50, initial_log_variance=-2.0).kl()
    torch.testing.assert_close(loss + WEIGHT * kl, total.detach(), rtol=1e-9, atol=1e-9)
    for n, p in model.named_parameters():
        torch.testing.assert_close(mean[n] - p, mean[n].grad, rtol=1e-9, atol=1e-9)
        moved = -2.0 - optimizer.state[p]["log_variance"]
        torch.testing.assert_close(moved, log_variance[n].grad, rtol=1e-9, atol=1e-9)


class Merged(nn.Module):
    """Positions in the rows of a linear layer, which then share a sample of its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.reshape(-1, 4))).reshape(len(x), 3, 5) * 1.1
        return self.last(self.second(hidden.reshape(-1, 5)).reshape(len(x), 9))


def images(*layers: nn.Module, inputs: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, 3))


MODELS = {
    "lenet": (
        lambda: images(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), inputs=3),
        (7, 2, 6, 6),
    ),
    "convolution after linear": (
        lambda: images(nn.Linear(8, 16), nn.Unflatten(1, (2, 8)), nn.Conv1d(2, 3, 3), inputs=18),
        (7, 8),
    ),
    "convolutions only": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()), (7, 2, 3)),
    "transposed": (lambda: images(nn.ConvTranspose2d(2, 2, 2), inputs=32), (7, 2, 3, 3)),
    "group norm": (lambda: images(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), inputs=64), (7, 2, 6, 6)),
    "sequence": (lambda: images(nn.Linear(4, 5), nn.LayerNorm(5), inputs=15), (7, 3, 4)),
    "merged": (Merged, (7, 3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("of_convolutions", [None, 1, 2])
def test_samples_at_once_are_those_taken_one_after_the_other(name, local, of_convolutions):
    def run(vectorized: bool) -> tuple:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            build, shape = MODELS[name]
            model, x = build().double(), torch.randn(shape, dtype=torch.float64)
        options = {"mc_samples": 4, "convolution_samples": of_convolutions, "vectorized": vectorized}
        optimizer = credo.BayesByBackprop(
            model,
            0.05,
            data_size=50,
            inner=torch.optim.SGD,
            initial_log_variance=-1.0,
            local=local,
            **options,
        )
        losses = [optimizer.step(lambda: F.cross_entropy(model(x), Y, reduction="none")) for _ in range(3)]
        return snapshot(model), optimizer.posterior().variance, losses, dict(optimizer.counters)

    torch.testing.assert_close(run(False), run(True), rtol=1e-10, atol=1e-12)


class Rows(TorchDispatchMode):
    """How many images went into convolutions, forward."""

    def __init__(self):
        super().__init__()
        self.images = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.images += len(args[0])
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("of_convolutions", "vectorized", "runs"), [(1, True, 1), (2, True, 2), (1, False, 4)]
)
def test_at_once_convolutions_are_run_once_for_those_that_share_them(of_convolutions, vectorized, runs):
    model = network()
    optimizer = credo.BayesByBackprop(
        model, data_size=50, mc_samples=4, convolution_samples=of_convolutions, vectorized=vectorized
    )
    with Rows() as rows:
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    assert rows.images == runs * 2 * len(X)  # 2: a convolution of the means and one of the variances


def test_blocks_share_the_noise_of_convolutions_whatever_is_looked_at_between():
    model, seen = network(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    optimizer = credo.BayesByBackprop(model, data_size=50, mc_samples=4, convolution_samples=2)
    outputs = []
    for k in range(4):
        with optimizer.sampled():
            outputs.append(model(X))
            F.cross_entropy(outputs[-1], Y).backward()
        if k == 0:
            with optimizer.sampled(), torch.no_grad():
                model(X)
    del seen[1]  # the look
    optimizer.step()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    assert len({float(out.detach().sum()) for out in outputs}) == 4


def backward_inside(model: nn.Module) -> Tensor:
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss


CLOSURES = {
    "backward": (backward_inside, CallOrderError, "without calling backward"),
    "one number": (lambda model: F.cross_entropy(model(X), Y), InvalidValue, r"shape \(M,\); got \(\)"),
    "no tensor": (lambda model: 1.0, InvalidType, "got float"),
    "other losses": (
        lambda model: F.cross_entropy(model(X), Y, reduction="none")[:3],
        InvalidValue,
        "3 losses",
    ),
}


@pytest.mark.parametrize(("closure", "error", "match"), CLOSURES.values(), ids=CLOSURES.keys())
def test_at_once_a_closure_must_return_losses(closure, error, match):
    model = network()
    optimizer = credo.BayesByBackprop(model, data_size=50, mc_samples=2, vectorized=True)
    before = learned(model, optimizer)
    with pytest.raises(error, match=match):
        optimizer.step(lambda: closure(model))
    assert_unchanged(before, model, optimizer)
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    assert optimizer.counters["step"] == 1


@pytest.mark.parametrize(
    "own", [nn.BatchNorm1d(5), nn.GRU(5, 5, batch_first=True)], ids=["batch norm", "gru"]
)
def test_what_cannot_be_computed_at_once_is_refused_with_the_remedy(own):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.own = nn.Linear(6, 5), own

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out = self.own(hidden if isinstance(self.own, nn.BatchNorm1d) else hidden[:, None])
            return out if isinstance(out, Tensor) else out[0][:, 0]

    model = Model().double()
    optimizer = credo.BayesByBackprop(model, data_size=50, mc_samples=2, vectorized=True)
    with pytest.raises(UnsupportedOperation, match=r"(?s)cannot be computed at once.*vectorized=False"):
        optimizer.step(lambda: F.cross_entropy(model(X[:, 0]), Y, reduction="none"))
    assert optimizer.counters["step"] == 0


@pytest.mark.parametrize("wrong", [0, 3, 20, 1.5])
def test_the_samples_of_convolutions_must_divide_all_samples(wrong):
    with pytest.raises((InvalidValue, InvalidType), match="convolution_samples"):
        credo.BayesByBackprop(network(), data_size=50, mc_samples=10, convolution_samples=wrong)


def test_a_run_at_once_resumes_exactly():
    def run(stop: int | None) -> dict[str, Tensor]:
        model = network()
        options = {"mc_samples": 4, "convolution_samples": 2, "vectorized": True}
        optimizer = credo.BayesByBackprop(model, data_size=50, **options)
        for t in range(4):
            if t == stop:
                saved = optimizer.state_dict()
                optimizer = credo.BayesByBackprop(model, data_size=50, **options)
                optimizer.load_state_dict(saved)
            optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
        return snapshot(model)

    assert all(torch.equal(a, b) for a, b in zip(run(None).values(), run(2).values(), strict=True))
