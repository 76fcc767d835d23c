"""Which parameters K-FAC takes as layers: reused, frozen, late and mixed ones; what it leaves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import InvalidValue, UnsupportedOperation
from tests.optim.replay import snapshot
from tests.optim.test_algorithm import batches, closure_for, network


def trained(method=credo.NoisyKFAC, data_size: int = 100, steps: int = 3, **options):
    model = network()
    optimizer = method(model, data_size=data_size, **options)
    for x, y in batches(steps):
        optimizer.step(closure_for(optimizer, model, x, y, []))
    return model, optimizer


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.fc(self.fc(x).tanh()))


def test_a_reused_layer_keeps_its_exact_squares():
    model = Reused().double()
    (x, y), optimizer = next(batches(1)), credo.KFAC(model, 0.0, data_size=100)
    optimizer.step(closure_for(optimizer, model, x, y, []))
    squares = credo.squared_gradients(model, lambda: F.cross_entropy(model(x), y))
    assert list(optimizer.factors()) == ["out"]
    torch.testing.assert_close(optimizer.curvature()["fc.weight"], squares["fc.weight"] / 7)
    assert optimizer.posterior().dense_covariance("fc").count_nonzero() == 20


def test_a_layer_must_be_used_alike_in_every_step():
    model = Reused().double()
    (x, y), optimizer = next(batches(1)), credo.KFAC(model, data_size=100)
    optimizer.step(lambda: F.cross_entropy(model.out(model.fc(x)), y, reduction="none"))
    before = snapshot(model)
    with pytest.raises(UnsupportedOperation, match=r"'fc\.bias' had Kronecker factors"):
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_frozen_bias_conditions_the_layer():
    model, optimizer = trained()
    a, g = optimizer.factors()["0"]
    model[0].bias.requires_grad_(False)
    posterior = optimizer.posterior()
    assert "0.bias" not in posterior.mean
    torch.testing.assert_close(optimizer.factors()["0"], (a[:-1, :-1], g))
    bias = model[0].bias.detach().clone()
    for x, y in batches(2):
        optimizer.step(closure_for(optimizer, model, x, y, []))
    assert torch.equal(model[0].bias, bias)
    model[0].bias.requires_grad_(True)
    for x, y in batches(2):
        optimizer.step(closure_for(optimizer, model, x, y, []))
    assert not torch.equal(model[0].bias, bias)
    assert optimizer.factors()["0"][0].shape == a.shape


def test_weight_and_bias_cannot_differ_in_being_deterministic():
    model = nn.Linear(4, 3).double()
    groups = [
        {"params": [("weight", model.weight)]},
        {"params": [("bias", model.bias)], "deterministic": True},
    ]
    (x, y), optimizer = next(batches(1)), credo.NoisyKFAC(groups, data_size=100)
    with pytest.raises(InvalidValue, match="'weight' and its bias"):
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))


def test_steps_between_refreshes_are_plain_and_late_parameters_join():
    model, late = network(), nn.Linear(3, 3).double()
    optimizer = credo.KFAC(nn.ModuleList([model, late]), data_size=100, factor_interval=100)
    for x, y in batches(6):
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y, reduction="none"))
    factors = {n: f[0].clone() for n, f in optimizer.factors().items()}
    assert factors.keys() == {"0.0", "0.2"}
    used = [lambda x, y: F.cross_entropy(late(model(x)), y, reduction="none")] * 2
    for (x, y), losses in zip(batches(2), used, strict=True):
        optimizer.step(lambda x=x, y=y, losses=losses: losses(x, y))
    assert optimizer.factors().keys() == {"0.0", "0.2", "1"}


def test_the_pure_posterior_has_no_damping():
    _, optimizer = trained(damping=0.5, damping_form="eigen")
    a, g = optimizer.factors()["2"]
    truth = torch.linalg.inv(torch.kron(a, g) + torch.eye(len(a) * len(g)).double() / 100) / 100
    pure = optimizer.posterior(damped=False)
    torch.testing.assert_close(pure.dense_covariance("2"), truth, rtol=1e-8, atol=1e-12)
    assert bool((optimizer.posterior().variance["2.weight"] < pure.variance["2.weight"]).all())


def test_its_posterior_is_a_prior_for_the_others():
    _, optimizer = trained()
    prior = optimizer.posterior()
    for method in (credo.VOGN, credo.NoisyKFAC, credo.KFAC):
        model = network()
        other = method(model, data_size=100, prior=prior)
        for x, y in batches(2):
            other.step(closure_for(other, model, x, y, []))
        assert float(other.posterior().kl(prior if method is not credo.VOGN else 1.0)) > 0


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_is_divided_out_of_the_factors(unscale):
    found = []
    for scaled in (False, True):
        model = network()
        optimizer = credo.KFAC(model, data_size=100)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for x, y in batches(4):
            with optimizer.sampled(scale=scaler.get_scale() if scaled and unscale else None):
                scaler.scale(F.cross_entropy(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append((snapshot(model), optimizer.factors()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
