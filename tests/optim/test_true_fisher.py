"""K-FAC with labels drawn from the model."""

import pytest
import torch
from torch import nn

import credo
from credo.errors import CallOrderError, InvalidType, InvalidValue
from tests.optim.replay import snapshot
from tests.optim.test_algorithm import batches, closure_for, network


def test_the_true_fisher_of_a_linear_model_is_its_gauss_newton_matrix():
    """Over many draws of the labels, G tends to I for half the squared error and to diag(p) − ppᵀ for logits."""
    layer = nn.Linear(3, 3).double()
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = layer(x).softmax(1).detach()
    expected = {
        "gaussian": torch.eye(3).double(),
        "categorical": (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0),
    }
    for likelihood, truth in expected.items():
        optimizer = credo.KFAC(layer, 0.0, data_size=100, fisher="true", factor_interval=1, ema_rate=0.01)

        def closure(optimizer=optimizer, likelihood=likelihood):
            optimizer.zero_grad()
            outputs = layer(x)
            optimizer.observe(outputs, likelihood)
            loss = outputs.square().mean()
            loss.backward()
            return loss

        for _ in range(400):
            optimizer.step(closure)
        a, g = optimizer.factors()[""]
        ones = torch.cat([x, torch.ones(64, 1).double()], 1)
        torch.testing.assert_close(a, ones.T @ ones / 64, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(g, truth, rtol=0, atol=0.05)


def test_the_true_fisher_needs_to_see_the_outputs():
    (x, y), model = next(batches(1)), network()
    optimizer = credo.KFAC(model, data_size=100, fisher="true")
    before = snapshot(model)
    with pytest.raises(CallOrderError, match=r"observe\(outputs\)"):
        optimizer.step(closure_for(optimizer, model, x, y, []))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    with pytest.raises(CallOrderError, match="inside a sampling block"):
        optimizer.observe(model(x))
    with pytest.raises(CallOrderError, match="empirical"):
        credo.KFAC(model, data_size=100).observe(model(x))
    for outputs, likelihood, kind, message in (
        (None, "categorical", InvalidType, "NoneType"),
        (model(x).detach(), "categorical", InvalidType, "without a graph"),
        (model(x)[0], "categorical", InvalidValue, r"\(3,\)"),
        (model(x), "poisson", InvalidValue, "likelihood"),
    ):
        with optimizer.sampled(), pytest.raises(kind, match=message):
            optimizer.observe(outputs, likelihood)


def test_the_true_fisher_sees_micro_batches_as_one_batch():
    factors = []
    for parts in ([slice(0, 7)], [slice(0, 2), slice(2, 7)]):
        (x, _), model = next(batches(1)), network()
        optimizer = credo.KFAC(model, 0.0, data_size=100, fisher="true")
        with optimizer.sampled():
            for part in parts:
                outputs = model(x[part])
                optimizer.observe(outputs, "gaussian")
                (outputs.square().sum() / 7).backward()
        optimizer.step()
        factors.append(optimizer.factors()["2"])
    torch.testing.assert_close(factors[0][0], factors[1][0], rtol=1e-12, atol=1e-14)
    assert float(factors[0][1].trace()) == pytest.approx(float(factors[1][1].trace()), rel=2.0)
