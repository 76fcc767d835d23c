"""Bayes by Backprop: its gradient against a hand-written objective, its KL, and where it comes to rest."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import InvalidValue
from tests.optim.replay import snapshot

DELTA = 2.0


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
        return nn.Sequential(*layers).double()


X = torch.randn(7, 1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(7) % 3


def some_posterior() -> credo.DiagonalPosterior:
    generator = torch.Generator().manual_seed(9)
    named = dict(network().named_parameters())
    mean = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named.items()}
    variance = {n: torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.1 for n, p in named.items()}
    return credo.DiagonalPosterior(mean, variance)


def gradients_seen(model: nn.Module, **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients that the inner optimiser is given: SGD with rate 1 moves by just these."""
    optimizer = credo.BayesByBackprop(
        model, lr=1.0, data_size=50, inner=torch.optim.SGD, initial_log_variance=-2.0, **options
    )
    before, names = snapshot(model), optimizer.names()
    reduction = options.get("reduction", "mean")
    for _ in range(options.get("mc_samples", 1)):
        with optimizer.sampled():
            F.cross_entropy(model(X), Y, reduction=reduction).backward()
    optimizer.step()
    by_mean = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    by_log_variance = {names[id(p)]: -2.0 - optimizer.state[p]["log_variance"] for p in model.parameters()}
    return by_mean, by_log_variance


def noise_of(shape, seed: int, draw: int, index: int) -> Tensor:
    epsilon = torch.empty(shape, dtype=torch.float64)
    credo.kernels.noise.normal_(epsilon, seed, draw, index)
    return epsilon


def objective(mean: dict, log_variance: dict, local: bool, options: dict, draw: int) -> Tensor:
    """Mean loss + τ·KL/N by hand, with the noise of sample `draw`."""
    index = {name: k for k, name in enumerate(mean)}
    variance = {n: v.exp() for n, v in log_variance.items()}

    def layer(function, x, name):
        w, b = f"{name}.weight", f"{name}.bias"
        if local:
            spread = function(x * x, variance[w], variance[b])
            return function(x, mean[w], mean[b]) + spread.sqrt() * noise_of(
                spread.shape, 0, draw, 2 * index[w] + 1
            )
        drawn = [
            mean[n] + variance[n].sqrt() * noise_of(mean[n].shape, 0, draw, 2 * index[n]) for n in (w, b)
        ]
        return function(x, *drawn)

    hidden = torch.tanh(layer(F.conv1d, X, "0")).flatten(1)
    loss = F.cross_entropy(layer(F.linear, torch.tanh(layer(F.linear, hidden, "3")), "5"), Y)
    prior = options.get("prior")
    kl = 0.0
    for n in mean:
        m0 = 0.0 if prior is None else prior.mean[n]
        v0 = (
            torch.tensor(1 / options.get("prior_precision", 1.0), dtype=torch.float64)
            if prior is None
            else prior.variance[n]
        )
        terms = variance[n] / v0 - 1 - (variance[n] / v0).log() + (mean[n] - m0) ** 2 / v0
        kl = kl + 0.5 * terms.sum()
    return loss + options.get("tempering", 1.0) * kl / (50 * options.get("augmentation", 1.0))


OPTIONS = {
    "one sample": {},
    "three samples": {"mc_samples": 3},
    "tempered": {"tempering": 0.3},
    "strong prior": {"prior_precision": 40.0},
    "augmented": {"augmentation": 10.0},
    "a posterior as prior": {"prior": some_posterior()},
    "sum loss": {"reduction": "sum", "mc_samples": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("local", [True, False])
def test_the_gradient_is_that_of_the_objective(local, options, both_kernels):
    model = network()
    mean = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    log_variance = {n: torch.full_like(p, -2.0).requires_grad_() for n, p in mean.items()}
    samples = options.get("mc_samples", 1)
    total = sum(objective(mean, log_variance, local, options, draw) for draw in range(samples)) / samples
    total.backward()
    by_mean, by_log_variance = gradients_seen(model, local=local, **options)
    for n in mean:
        torch.testing.assert_close(by_mean[n], mean[n].grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(by_log_variance[n], log_variance[n].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior", [None, some_posterior()], ids=["number", "posterior"])
def test_the_kl_is_the_closed_form(prior):
    model = network()
    optimizer = credo.BayesByBackprop(
        model, data_size=50, prior_precision=3.0, prior=prior, initial_log_variance=-1.0
    )
    for _ in range(3):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    posterior, total = optimizer.posterior(), 0.0
    for n, mean in posterior.mean.items():
        q = torch.distributions.Normal(mean, posterior.variance[n].sqrt())
        zero, three = torch.zeros_like(mean), torch.full_like(mean, 3.0)
        p0 = (
            torch.distributions.Normal(zero, three.rsqrt())
            if prior is None
            else torch.distributions.Normal(prior.mean[n], prior.variance[n].sqrt())
        )
        total += torch.distributions.kl_divergence(q, p0).sum()
    torch.testing.assert_close(optimizer.kl(), total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        optimizer.kl(), posterior.kl(3.0 if prior is None else prior), rtol=1e-10, atol=1e-10
    )


def regression(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.7]], dtype=torch.float64
    )
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return x, x @ truth + torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:a batch has 6000 examples")
@pytest.mark.parametrize("tempering", [1.0, 0.5])
def test_linear_regression_reaches_the_mean_field_optimum(tempering):
    """The mean is the ridge solution, the precision Σx²/τ + δ; iterates are averaged while the step falls.

    The batch holds every example a hundred times, each with noise of its own: the same expected loss, less noise.
    """
    x, y = regression()
    many, targets = x.repeat(100, 1), y.repeat(100)
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = credo.BayesByBackprop(
        model, 0.05, data_size=len(x), prior_precision=DELTA, tempering=tempering
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 100))
    mean, log_variance, steps = 0.0, 0.0, 1500
    for t in range(steps):
        optimizer.step(lambda: 0.5 * (model(many)[:, 0] - targets).square().mean())
        rate.step()
        if t >= steps // 2:
            mean = mean + model.weight.detach()[0] / (steps // 2)
            log_variance = log_variance + optimizer.state[model.weight]["log_variance"][0] / (steps // 2)
    ridge = torch.linalg.solve(x.T @ x + tempering * DELTA * torch.eye(3).double(), x.T @ y)
    torch.testing.assert_close(mean, ridge, rtol=0.03, atol=0)
    precision = x.square().sum(0) / tempering + DELTA
    torch.testing.assert_close(log_variance.exp(), 1 / precision, rtol=0.03, atol=0)


def test_any_inner_optimiser_and_its_state_is_kept():
    for inner in (torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop):
        model = network()
        optimizer = credo.BayesByBackprop(model, 1e-3, data_size=50, inner=inner)
        before = F.cross_entropy(model(X), Y).item()
        for _ in range(60):
            optimizer.step(lambda net=model: F.cross_entropy(net(X), Y, reduction="none"))
        assert F.cross_entropy(model(X), Y).item() < before
        kept = {name.split(".")[0] for name in optimizer.state[model[0].weight] if "." in name}
        assert kept == {"mean", "log_variance"}


def test_a_state_of_another_inner_optimiser_is_refused():
    model = network()
    optimizer = credo.BayesByBackprop(model, data_size=50)
    other = credo.BayesByBackprop(network(), data_size=50, inner=torch.optim.SGD)
    with pytest.raises(InvalidValue, match=r"inner optimiser SGD, here it is Adam"):
        optimizer.load_state_dict(other.state_dict())


def test_initialisation_of_the_paper_and_at_the_prior():
    model, state = nn.Linear(200, 100), torch.get_rng_state()
    credo.BayesByBackprop(model, data_size=50, initial_mean_sd=0.1)
    assert abs(model.weight.std().item() - 0.1) < 0.003
    assert torch.equal(torch.get_rng_state(), state)
    prior = some_posterior()
    started = credo.BayesByBackprop(network(), data_size=50, prior=prior, initial_log_variance=None)
    torch.testing.assert_close(started.posterior().variance, prior.variance, rtol=1e-12, atol=0)
    fixed = credo.BayesByBackprop(network(), data_size=50, prior_precision=4.0, initial_log_variance=None)
    assert all(torch.allclose(v, torch.tensor(0.25).double()) for v in fixed.posterior().variance.values())


def test_normalisation_layers_have_neither_noise_nor_variance():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = credo.BayesByBackprop(model, data_size=50)
    before = model[1].weight.detach().clone()
    optimizer.step(lambda: F.cross_entropy(model(X[:, 0]), Y, reduction="none"))
    assert optimizer.posterior().deterministic == {"1.weight", "1.bias"}
    assert not torch.equal(model[1].weight, before)


def test_variances_stay_positive_and_finite_whatever_the_inner_optimiser_does():
    model = network()
    optimizer = credo.BayesByBackprop(model, 1e6, data_size=50, inner=torch.optim.SGD)
    for _ in range(9):  # the tenth refused step in a row would raise
        optimizer.step(lambda: F.mse_loss(model(X), torch.full((7, 3), 1e100, dtype=torch.float64)))
    for state in optimizer.state.values():
        variance = state["log_variance"].exp()
        assert bool((variance > 0).all())
        assert bool(variance.isfinite().all())
