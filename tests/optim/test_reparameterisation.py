"""Noise on outputs against noise on weights; which operations get which; and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import credo
from credo.errors import UnsupportedOperation
from tests.optim.replay import snapshot

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding="valid", groups=2), (2, 2, 5, 5)),
    "circular": (lambda: nn.Conv2d(1, 2, 3, padding="same", padding_mode="circular"), (2, 1, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3)),
}


def optimiser(model: nn.Module, **options) -> credo.BayesByBackprop:
    return credo.BayesByBackprop(model, data_size=100, **{"initial_log_variance": -1.0, **options})


def outputs(model: nn.Module, x: Tensor, draws: int, **options) -> Tensor:
    optimizer, found = optimiser(model, **options), []
    for _ in range(draws):
        with optimizer.sampled(), torch.no_grad():
            found.append(model(x))
    return torch.stack(found)


def moments(build, x: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, and mean and variance of its outputs in closed form."""
    model, spread = build().double(), build().double()
    with torch.no_grad():
        for p in spread.parameters():
            p.fill_(torch.tensor(-1.0).exp())
        return model, model(x), spread(x.square())


def assert_moments(found: Tensor, mean: Tensor, variance: Tensor) -> None:
    n = len(found)
    assert ((found.mean(0) - mean) / (variance / n).sqrt()).abs().max() < 5
    assert ((found.var(0) - variance) / (variance * (2 / n) ** 0.5)).abs().max() < 5


@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_noise_on_outputs_has_the_moments_of_noise_on_weights(build, shape, both_kernels):
    """20,000 examples of the same input, in one block, have noise of their own: |z| < 5."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:1]
    model, mean, variance = moments(build, x)
    found = outputs(model, x.expand(20_000, *x.shape[1:]).contiguous(), 1)[0]
    assert_moments(found, mean[0], variance[0])


@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_samples_of_the_weights_have_the_same_moments(build, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, mean, variance = moments(build, x)
    assert_moments(outputs(model, x, 600, local=False), mean, variance)


def test_examples_have_noise_of_their_own_only_locally():
    x = torch.ones(2, 4).double()
    for local, alike in ((True, False), (False, True)):
        found = outputs(nn.Linear(4, 3).double(), x, 1, local=local)[0]
        assert torch.equal(found[0], found[1]) == alike


class Sequence(nn.Module):
    """Positions of one example share their weights, merged into the rows or not."""

    def __init__(self, merged: bool):
        super().__init__()
        self.linear, self.merged = nn.Linear(4, 3).double(), merged

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 4) if self.merged else x).reshape(2, 5, 3)


@pytest.mark.parametrize("merged", [False, True])
def test_positions_of_one_example_share_a_sample_of_the_weights(merged):
    x = torch.ones(2, 5, 4, dtype=torch.float64)
    found = outputs(Sequence(merged), x, 1)[0]
    assert torch.allclose(found[:, 0], found[:, 3], rtol=1e-12)


class Tied(nn.Module):
    def __init__(self, calls: int):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3).double(), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.linear(x)
        return x if self.calls > 1 else x @ self.linear.weight


@pytest.mark.parametrize("calls", [1, 2])
def test_a_parameter_with_two_uses_is_refused_locally_and_right_globally(calls):
    x, model = torch.randn(4, 3).double(), Tied(calls)
    before = snapshot(model)
    optimizer = optimiser(model)
    with pytest.raises(UnsupportedOperation, match=r"'linear.weight' is used more than once.*local=False"):
        optimizer.step(lambda: model(x).square().mean(1))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    optimizer = optimiser(model, local=False)
    optimizer.step(lambda: model(x).square().mean(1))
    assert optimizer.counters["step"] == 1


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return None, (grad * ctx.saved_tensors[0]).sum(0)


def test_a_use_that_cannot_be_seen_is_refused_by_name():
    weight, model = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
    optimizer = optimiser([("own", weight), *model.named_parameters()])
    with pytest.raises(UnsupportedOperation, match="'own' was used where it cannot be seen"):
        optimizer.step(lambda: model(Unseen.apply(torch.ones(2, 3), weight)).mean(1))


MODELS = {
    "lstm": lambda: nn.LSTM(4, 3, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "transposed": lambda: nn.ConvTranspose1d(5, 3, 2),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_everything_else_takes_a_sample_of_the_weights(build):
    """Every parameter gets a gradient for μ and for σ², and two blocks differ."""
    model, x = build().double(), torch.randn(2, 5, 4).double()
    optimizer, seen = optimiser(model), []

    def loss() -> Tensor:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        seen.append(out.detach())
        return out.square().flatten(1).mean(1)

    before = {p: s["log_variance"].clone() for p, s in optimizer.state.items() if "log_variance" in s}
    mean = snapshot(model)
    optimizer.step(loss)
    with optimizer.sampled():
        loss()
    assert not torch.equal(seen[0], seen[1])
    assert all(not torch.equal(p, mean[n]) for n, p in model.named_parameters())
    assert all(not torch.equal(optimizer.state[p]["log_variance"], v) for p, v in before.items())


def two_layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_a_checkpoint_runs_again_with_the_same_noise():
    x, results = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(), []
    for recompute in (False, True):
        model = two_layers()
        optimizer = optimiser(model, lr=0.01)
        for _ in range(3):
            with optimizer.sampled():
                for part in (x[:2], x[2:]):
                    hidden = (
                        checkpoint(model[:2], part, use_reentrant=False) if recompute else model[:2](part)
                    )
                    (model[2](hidden).square().sum() / 6).backward()
            optimizer.step()
        results.append((snapshot(model), optimizer.posterior().variance))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("local", [True, False])
def test_micro_batches_have_one_sample_of_the_weights_and_their_own_noise(local):
    model, x = two_layers(), torch.ones(2, 4).double()
    optimizer, seen = optimiser(model, local=local), []
    with optimizer.sampled():
        for _ in range(2):
            out = model(x)
            seen.append(out.detach())
            (out.square().mean() / 2).backward()
    assert torch.equal(seen[0], seen[1]) != local
    optimizer.step()
    assert optimizer.counters["step"] == 1


def test_inputs_that_are_all_zero_have_a_finite_gradient(both_kernels):
    model = nn.Linear(4, 3, bias=False)
    optimizer = optimiser(model)
    optimizer.step(lambda: F.cross_entropy(model(torch.zeros(2, 4)), torch.tensor([0, 1]), reduction="none"))
    assert optimizer.counters == {**optimizer.counters, "step": 1, "refused": 0}


def test_a_block_shows_a_sample_and_keeps_the_mean():
    model = two_layers()
    optimizer, mean = optimiser(model), snapshot(model)
    with optimizer.sampled():
        inside = snapshot(model)
        assert torch.equal(model[0].weight.detach(), inside["0.weight"])
    assert all(not torch.equal(inside[n], mean[n]) for n in mean)
    assert all(torch.equal(p, mean[n]) for n, p in model.named_parameters())


def test_autocast_and_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last)
    optimizer = optimiser(model)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), torch.tensor([0, 1, 2]), reduction="none").float()

    for _ in range(2):
        optimizer.step(loss)
    assert optimizer.counters == {**optimizer.counters, "step": 2, "refused": 0}
