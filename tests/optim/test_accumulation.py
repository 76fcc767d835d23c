"""Micro-batches add up to one batch, exactly; gradients from elsewhere are never dropped in silence."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, CredoError

METHODS = ["VOGN", "OGN", "KFAC", "NoisyKFAC", "IVON", "BayesByBackprop"]
X = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
PARTS = {"equal": [3, 3, 3, 3], "unequal": [5, 1, 4, 2]}


def build(method: str, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if method == "BayesByBackprop":  # its noise is of outputs, so that other batches have other noise
        settings["initial_log_variance"] = -60.0
    return model, getattr(credo, method)(model, lr=0.1, data_size=100, seed=1, **settings)


def closure_of(model, optimizer, x, y, reduction="mean"):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        loss.backward()
        return loss

    return closure


def snapshot(model, optimizer):
    posterior = optimizer.posterior()
    return {
        **{n: p.detach().clone() for n, p in model.named_parameters()},
        **{f"var {n}": v for n, v in posterior.variance.items()},
    }


def whole(method, reduction="mean", steps=3, **settings):
    model, optimizer = build(method, reduction=reduction, **settings)
    for _ in range(steps):
        optimizer.step(closure_of(model, optimizer, X, Y, reduction))
    return snapshot(model, optimizer)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("method", METHODS)
def test_closures_of_micro_batches_are_one_batch(method, sizes, reduction):
    model, optimizer = build(method, reduction=reduction)
    optimizer.accumulate(4)
    for _ in range(3):
        for k, (x, y) in enumerate(zip(X.split(sizes), Y.split(sizes), strict=True)):
            assert optimizer.pending() == k
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step(closure_of(model, optimizer, x, y, reduction))
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == (k == 3)
    assert optimizer.counters["step"] == 3
    rtol = 1e-6 if method == "BayesByBackprop" else 1e-10
    torch.testing.assert_close(snapshot(model, optimizer), whole(method, reduction), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"mc_samples": 3}, {"mc_samples": 3, "vectorized": True}], ids=["in turn", "at once"]
)
def test_several_samples(settings):
    model, optimizer = build("VOGN", **settings)
    optimizer.accumulate(4)
    for _ in range(3):
        for x, y in zip(X.split([5, 1, 4, 2]), Y.split([5, 1, 4, 2]), strict=True):
            optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y, reduction="none"))
    other, reference = build("VOGN", **settings)
    for _ in range(3):
        reference.step(lambda: F.cross_entropy(other(X), Y, reduction="none"))
    torch.testing.assert_close(snapshot(model, optimizer), snapshot(other, reference), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_micro_batches_are_one_batch(method):
    model, optimizer = build(method)
    optimizer.accumulate(3)
    for _ in range(3):
        for x, y in zip(X.split(4), Y.split(4), strict=True):
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    rtol = 1e-6 if method == "BayesByBackprop" else 1e-10
    torch.testing.assert_close(snapshot(model, optimizer), whole(method), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_from_elsewhere_are_refused_by_a_closure_that_keeps_them(method):
    """As Lightning does with accumulate_grad_batches: backward passes before, and a closure that adds to them."""
    model, optimizer = build(method)
    F.cross_entropy(model(X[:6]), Y[:6]).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    mean = [p.detach().clone() for p in model.parameters()]

    def closure():
        loss = F.cross_entropy(model(X[6:]), Y[6:])
        loss.backward()
        return loss

    for given in (closure, lambda: F.cross_entropy(model(X[6:]), Y[6:], reduction="none")):
        with pytest.raises(CallOrderError, match=r"accumulate\(n\)"):
            optimizer.step(given)
        for p, grad, value in zip(model.parameters(), grads, mean, strict=True):
            assert torch.equal(p.grad, grad)
            assert torch.equal(p, value)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_closure_that_clears_them_is_as_if_they_had_not_been(method, to_none):
    results = []
    for disturbed in (False, True):
        model, optimizer = build(method)
        for _ in range(2):
            if disturbed:
                F.cross_entropy(model(X[:6]), Y[:6]).backward()

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad(set_to_none=to_none)
                loss = F.cross_entropy(model(X), Y)
                loss.backward()
                return loss

            optimizer.step(closure)
        results.append(snapshot(model, optimizer))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_dict_amid_micro_batches_resumes_exactly(method):
    def train(model, optimizer, parts):
        for x, y in parts:
            optimizer.step(closure_of(model, optimizer, x, y))

    parts = list(zip(X.split(2), Y.split(2), strict=True))
    model, optimizer = build(method)
    optimizer.accumulate(3)
    train(model, optimizer, parts)
    truth = snapshot(model, optimizer)
    model, optimizer = build(method)
    optimizer.accumulate(3)
    train(model, optimizer, parts[:4])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model, optimizer = build(method)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert optimizer.pending() == 1
    train(model, optimizer, parts[4:])
    torch.testing.assert_close(snapshot(model, optimizer), truth, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_amid_micro_batches_goes_on_as_the_original(method):
    model, optimizer = build(method)
    optimizer.accumulate(2)
    optimizer.step(closure_of(model, optimizer, X[:6], Y[:6]))
    other, copied = copy.deepcopy((model, optimizer))
    assert copied.pending() == 1
    optimizer.step(closure_of(model, optimizer, X[6:], Y[6:]))
    copied.step(closure_of(other, copied, X[6:], Y[6:]))
    torch.testing.assert_close(snapshot(other, copied), snapshot(model, optimizer), rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_another_optimiser_of_the_same_model_takes_no_notice_of_what_the_first_has_left(method):
    """As in continual learning, where each task has its own."""
    model, optimizer = build(method)
    optimizer.step(closure_of(model, optimizer, X, Y))
    assert any(p.grad is not None for p in model.parameters())
    later = getattr(credo, method)(model, lr=0.1, data_size=100)
    later.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    assert later.counters["step"] == 1


def test_bad_numbers_and_moments():
    model, optimizer = build("VOGN")
    for wrong in (0, -1, 1.5, "4", None):
        with pytest.raises(CredoError, match="micro_batches"):
            optimizer.accumulate(wrong)
    optimizer.accumulate(2)
    optimizer.step(closure_of(model, optimizer, X, Y))
    with pytest.raises(CallOrderError, match="1 micro-batches wait"):
        optimizer.accumulate(3)


def test_a_loss_scale_that_changes_between_micro_batches():
    model, optimizer = build("VOGN")
    optimizer.accumulate(2)
    for scale in (4.0, 8.0):
        with optimizer.sampled(scale=scale):
            (F.cross_entropy(model(X), Y) * scale).backward()
        if scale == 4.0:
            optimizer.step()
    with pytest.raises(CallOrderError, match="loss scale changed"):
        optimizer.step()
