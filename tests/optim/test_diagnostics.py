"""The numbers of `diagnostics` from the posterior and the state by hand, for every method."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, InvalidValue
from tests.optim.trained import X, Y, trained

METHODS = [credo.VOGN, credo.OGN, credo.BayesByBackprop, credo.IVON, credo.KFAC, credo.NoisyKFAC]
N, DELTA = 60, 5.0


@pytest.mark.parametrize("method", METHODS)
def test_noise_and_signal_are_those_of_the_posterior(method):
    _, optimizer = trained(method, prior_precision=DELTA)
    (found,), posterior = optimizer.diagnostics(), optimizer.posterior()
    mean, sigma = (
        torch.cat([t.flatten() for t in values.values()]) for values in (posterior.mean, posterior.variance)
    )
    sigma = sigma.sqrt()
    assert math.isclose(found.noise, sigma.median(), rel_tol=1e-5)
    assert math.isclose(found.signal_to_noise, (mean.abs() / sigma).median(), rel_tol=1e-5)
    assert found.weights == len(mean) == 43
    shares = found.curvature_share, found.prior_share, found.damping_share
    assert math.isclose(sum(shares), 1.0, abs_tol=1e-5)
    assert all(share >= 0 for share in shares)
    assert found.refused_steps == 0


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.IVON])
def test_shares_and_step_of_a_diagonal_precision(method):
    options = {"lr": 0.2} if method is credo.IVON else {"lr": 0.01, "damping": 0.2}
    _, optimizer = trained(method, prior_precision=DELTA, **options)
    (found,), damping = optimizer.diagnostics(), options.get("damping", 0.0)
    s = torch.cat([h.flatten() for h in optimizer.curvature().values()])
    precision = s + DELTA / N + damping
    assert math.isclose(found.curvature_share, (s / precision).mean(), rel_tol=1e-4)
    assert math.isclose(found.prior_share, (DELTA / N / precision).mean(), rel_tol=1e-4)
    assert math.isclose(found.damping_share, (damping / precision).mean(), rel_tol=1e-4)
    lr = optimizer.param_groups[0]["lr"]
    assert math.isclose(found.step_size, (lr / precision).median(), rel_tol=1e-4)


@pytest.mark.parametrize("form", ["eigen", "pi"])
@pytest.mark.parametrize("method", [credo.KFAC, credo.NoisyKFAC])
def test_shares_and_step_of_kronecker_factors(method, form):
    """Against the dense A ⊗ G of each layer; refreshed at every step, so that the inverses are those of the factors."""
    damping = 0.2
    options = {
        "factor_interval": 1,
        "inverse_interval": 1,
        "damping_form": form,
        "damping": damping,
        "lr": 0.01,
    }
    _, optimizer = trained(method, prior_precision=DELTA, **options)
    (found,), shift = optimizer.diagnostics(), DELTA / N + damping
    curvature, prior, steps = [], [], []
    for inputs, outputs in (tuple(t.double() for t in pair) for pair in optimizer.factors().values()):
        eye = [torch.eye(len(t)).double() for t in (inputs, outputs)]
        plain = torch.kron(inputs, outputs)
        pi = ((inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs))).sqrt()
        damped = (
            plain + shift * torch.eye(len(plain)).double()
            if form == "eigen"
            else torch.kron(inputs + pi * shift**0.5 * eye[0], outputs + shift**0.5 / pi * eye[1])
        )
        vectors = torch.linalg.eigh(damped)[1]  # plain and damped commute
        own, all_ = ((vectors.T @ matrix @ vectors).diagonal() for matrix in (plain, damped))
        curvature.append(own / all_)
        prior.append((1 - own / all_) * (DELTA / N) / shift)
        steps.append(torch.linalg.inv(damped).diagonal())
    assert math.isclose(found.curvature_share, torch.cat(curvature).mean(), rel_tol=1e-3)
    assert math.isclose(found.prior_share, torch.cat(prior).mean(), rel_tol=1e-3)
    lr = optimizer.param_groups[0]["lr"]
    assert math.isclose(found.step_size, lr * torch.cat(steps).median(), rel_tol=1e-3)


def test_bayes_by_backprop_calls_data_what_is_not_the_prior():
    _, optimizer = trained(credo.BayesByBackprop, prior_precision=DELTA, initial_log_variance=-2.0, lr=0.01)
    (found,) = optimizer.diagnostics()
    variance = torch.cat([v.flatten() for v in optimizer.posterior().variance.values()])
    assert math.isclose(found.prior_share, (DELTA * variance).mean(), rel_tol=1e-5)
    assert math.isclose(found.curvature_share, (1 - DELTA * variance).mean(), rel_tol=1e-4)
    assert found.damping_share == 0.0
    assert math.isclose(found.step_size, 0.01, rel_tol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_groups_deterministic_frozen_and_refused(method):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 3))
    groups = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "deterministic": True},
        {"params": model[2].parameters()},
        {"params": model[3].requires_grad_(False).parameters()},
    ]
    optimizer = method(groups, data_size=N)
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none") * float("nan"))
    first, norm, second, frozen = optimizer.diagnostics()
    assert (norm.signal_to_noise, norm.noise) == (math.inf, 0.0)
    assert (first.weights, second.weights, frozen.weights) == (25, 18, 0)
    assert math.isnan(frozen.noise)
    assert math.isnan(frozen.curvature_share)
    assert first.noise > 0
    assert first.refused_steps == 1


@pytest.mark.parametrize("method", METHODS)
def test_inside_a_block_it_is_refused(method):
    _, optimizer = trained(method)
    with optimizer.sampled(), pytest.raises(CallOrderError, match="diagnostics"):
        optimizer.diagnostics()


@pytest.mark.parametrize("method", METHODS)
def test_by_layer_is_as_if_each_layer_were_a_group(method):
    """Noise and signal from the posterior's own entries, shares as parts of the whole."""
    _, optimizer = trained(method, prior_precision=DELTA)
    layers = optimizer.diagnostics(by="layer")
    assert list(layers) == ["0", "2"]
    assert [own.weights for own in layers.values()] == [25, 18]
    posterior = optimizer.posterior()
    for name, own in layers.items():
        members = [f"{name}.weight", f"{name}.bias"]
        mean = torch.cat([posterior.mean[key].flatten() for key in members])
        sigma = torch.cat([posterior.variance[key].flatten() for key in members]).sqrt()
        assert math.isclose(own.noise, sigma.median(), rel_tol=1e-5)
        assert math.isclose(own.signal_to_noise, (mean.abs() / sigma).median(), rel_tol=1e-5)
    (whole,) = optimizer.diagnostics()
    mixed = sum(own.curvature_share * own.weights for own in layers.values()) / whole.weights
    assert math.isclose(mixed, whole.curvature_share, rel_tol=1e-4, abs_tol=1e-9)
    lines = str(layers).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:4] == ["layer", "signal", "to", "noise"]
    assert lines[1].split()[0] == "0"


def test_layers_of_bare_parameters_split_groups_and_no_names():
    model = nn.Module()
    model.scale, model.inner = nn.Parameter(torch.ones(3)), nn.Linear(4, 3)
    groups = [
        {"params": [("scale", model.scale), ("inner.weight", model.inner.weight)]},
        {"params": [("inner.bias", model.inner.bias)], "deterministic": True},
    ]

    def names(params) -> list[str]:
        optimizer = credo.VOGN(params, data_size=N)
        optimizer.step(lambda: F.cross_entropy(model.inner(X) * model.scale, Y, reduction="none"))
        return list(optimizer.diagnostics(by="layer"))

    assert names(model) == ["scale", "inner"]
    assert names(groups) == ["scale", "inner.weight", "inner.bias"]
    assert names(model.parameters()) == ["parameter_0", "parameter_1", "parameter_2"]


def test_another_way_to_divide_is_refused():
    _, optimizer = trained(credo.VOGN)
    with pytest.raises(InvalidValue, match=r"by must be 'group' or 'layer', got 'module'"):
        optimizer.diagnostics(by="module")
