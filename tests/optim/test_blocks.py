"""The mean always comes back, randomness is private, and a step that is not finite is refused."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, NonFiniteError
from credo.optim.statistics import StepStatistics
from tests.optim.replay import snapshot
from tests.optim.trained import METHODS, X, Y, assert_unchanged, learned, trained


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_block_restores_everything(method, error):
    model, optimizer = trained(method)
    before, draws = learned(model, optimizer), optimizer.counters["draws"]
    storages = [p.data_ptr() for p in model.parameters()]

    def interrupted():
        with optimizer.sampled():
            F.cross_entropy(model(X), Y).backward()
            raise error

    with pytest.raises(error):
        interrupted()
    assert_unchanged(before, model, optimizer)
    assert optimizer.counters["draws"] == draws
    assert [p.data_ptr() for p in model.parameters()] == storages
    with pytest.raises(CallOrderError, match="no gradient sample"):
        optimizer.step()


def test_an_exception_in_a_closure_restores_everything():
    model, optimizer = trained(mc_samples=2)
    before, calls = learned(model, optimizer), []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("data loader")
        return F.cross_entropy(model(X), Y, reduction="none")

    with pytest.raises(ValueError, match="data loader"):
        optimizer.step(closure)
    assert_unchanged(before, model, optimizer)


@pytest.mark.parametrize("by_hand", [False, True], ids=["closure", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_while_a_block_is_gathered_leaves_nothing_for_the_next(method, by_hand, monkeypatch):
    """Its sums were added, it was not counted yet: a step after it is that of a run without it."""

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    def step():
        if not by_hand:
            optimizer.step(closure)
            return
        with optimizer.sampled():
            closure()
        optimizer.step()

    def interrupted(self, seen, parameters, examples, scale):
        self._add(seen, parameters, examples)
        raise KeyboardInterrupt

    model, optimizer = trained(method)
    step()
    undisturbed = learned(model, optimizer)
    model, optimizer = trained(method)
    draws = optimizer.counters["draws"]
    with monkeypatch.context() as patch:
        patch.setattr(StepStatistics, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
    optimizer.counters["draws"] = draws  # so that the sample is the same one
    step()
    assert_unchanged(undisturbed, model, optimizer)


def test_a_sample_that_cannot_be_taken_leaves_the_gradients_of_those_before():
    model, optimizer = trained(mc_samples=2)
    with optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    kept, replaced = model[0], nn.Linear(model[0].in_features, model[0].out_features).to(X.dtype)
    model[0] = replaced
    with pytest.raises(CallOrderError, match="layer was replaced"), optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()
    model[0] = kept
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_step_from_a_closure_is_the_step_from_blocks(samples):
    """A closure's step updates means that are still put by, blocks bring them back before."""
    results = []
    for blocks in (False, True):
        model, optimizer = trained(mc_samples=samples)
        for _ in range(3):
            if blocks:
                for _ in range(samples):
                    with optimizer.sampled():
                        F.cross_entropy(model(X), Y).backward()
                optimizer.step()
            else:
                optimizer.step(lambda model=model: F.cross_entropy(model(X), Y, reduction="none"))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_weight_changed_between_steps_stays_changed():
    """Also by way of .data, which leaves no trace in its version."""
    model, optimizer = trained(lr=1e-12)
    for _ in range(2):
        model[0].weight.data.fill_(0.25)
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
        torch.testing.assert_close(model[0].weight, torch.full_like(model[0].weight, 0.25))


def test_a_closed_generator_restores_the_mean():
    model, optimizer = trained()
    before = learned(model, optimizer)

    def looking():
        with optimizer.sampled():
            yield snapshot(model)

    generator = looking()
    assert any(not torch.equal(a, before[name]) for name, a in next(generator).items())
    generator.close()
    assert_unchanged(before, model, optimizer)


def test_a_block_without_backward_is_a_look():
    model, optimizer = trained()
    before = learned(model, optimizer)
    with optimizer.sampled():
        first = snapshot(model)
    with optimizer.sampled():
        second = snapshot(model)
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert_unchanged(before, model, optimizer)
    with pytest.raises(CallOrderError, match="no gradient sample"):
        optimizer.step()


@pytest.mark.parametrize("method", METHODS)
def test_the_global_generator_is_untouched_and_seeds_decide(method):
    state = torch.get_rng_state()
    runs = [trained(method, seed=seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    same, other = (torch.equal(runs[0][0].weight, run[0].weight) for run in runs[1:])
    assert same
    assert other == (method in (credo.OGN, credo.KFAC))


def test_the_number_of_threads_does_not_change_the_noise():
    seen = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            model = nn.Linear(300, 300)
            with torch.no_grad():
                model.weight.zero_(), model.bias.zero_()
            optimizer = credo.VOGN(model, data_size=10, initial_curvature=1.0)
            with optimizer.sampled():
                seen.append(snapshot(model))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


@pytest.mark.parametrize("poison", ["loss", "input", "spike"])
@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_step_is_refused_and_counted(method, poison):
    model, optimizer = trained(method)
    before = learned(model, optimizer)
    bad = {"loss": (X, float("nan")), "input": (torch.full_like(X, float("inf")), 1.0), "spike": (X, 1e30)}
    x, factor = bad[poison]

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), Y) * factor
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_unchanged(before, model, optimizer)
    assert optimizer.counters["refused"] == 1
    variance = optimizer.posterior().variance
    assert all(bool((v > 0).all()) for v in variance.values())
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    assert optimizer.counters == {**optimizer.counters, "step": 3, "refused": 1, "refused_in_a_row": 0}


def test_ten_refused_steps_in_a_row_are_an_error():
    model, optimizer = trained()
    before = learned(model, optimizer)

    def poisoned():
        return F.cross_entropy(model(X), Y, reduction="none") * float("nan")

    for _ in range(9):
        optimizer.step(poisoned)
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        optimizer.step(poisoned)
    assert_unchanged(before, model, optimizer)
    assert optimizer.counters["refused"] == 10


def test_a_batch_larger_than_the_data_is_worth_a_warning():
    model = nn.Linear(4, 3)
    optimizer = credo.VOGN(model, data_size=5)
    with pytest.warns(UserWarning, match="6 examples, more than data_size=5"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))


@pytest.mark.parametrize("method", METHODS)
def test_steps_leave_nothing_to_the_garbage_collector(method):
    """Weak references that hung on the buffers of the model until a collection have crashed the interpreter."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = method(model, data_size=60)

    def steps(count: int) -> int:
        for _ in range(count):
            optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
        return len(gc.get_objects())

    steps(3)
    gc.collect()
    gc.disable()
    try:
        before = steps(1)
        assert steps(20) < before + 10
        assert weakref.getweakrefcount(model[1].num_batches_tracked) <= 1
    finally:
        gc.enable()
