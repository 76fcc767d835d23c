"""The mean always comes back, randomness is private, and calls at the wrong moment are refused."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue, NonFiniteError
from tests.optim.replay import snapshot

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
METHODS = [credo.VOGN, credo.OGN]


def trained(method=credo.VOGN, **options):
    """A model and an optimiser after two steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = method(model, data_size=60, **options)
    for _ in range(2):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    return model, optimizer


def learned(model, optimizer) -> dict:
    """Everything that a refused call must leave alone."""
    state = {
        f"{k}.{name}": v.clone()
        for k, p in enumerate(optimizer.state)
        for name, v in optimizer.state[p].items()
    }
    return {**snapshot(model), **state, "step": torch.tensor(optimizer.counters["step"])}


def assert_unchanged(before: dict, model, optimizer) -> None:
    after = learned(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_a_block_restores_everything(method, error):
    model, optimizer = trained(method)
    before, draws = learned(model, optimizer), optimizer.counters["draws"]
    storages = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error):
        with optimizer.sampled():
            F.cross_entropy(model(X), Y).backward()
            raise error
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
    assert other == (method is credo.OGN)


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
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        for _ in range(10):
            optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none") * float("nan"))
    assert_unchanged(before, model, optimizer)
    assert optimizer.counters["refused"] == 10


def step_without_sample(model, optimizer):
    optimizer.step()


def too_few_samples(model, optimizer):
    optimizer.settings["mc_samples"] = 3
    with optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def nested(model, optimizer):
    with optimizer.sampled(), optimizer.sampled():
        pass


def step_inside(model, optimizer):
    with optimizer.sampled():
        optimizer.step()


def save_inside(model, optimizer):
    with optimizer.sampled():
        optimizer.state_dict()


def posterior_inside(model, optimizer):
    with optimizer.sampled():
        optimizer.posterior()


def copy_inside(model, optimizer):
    import copy

    with optimizer.sampled():
        copy.deepcopy(optimizer)


def backward_outside(model, optimizer):
    with optimizer.sampled():
        loss = F.cross_entropy(model(X), Y)
    loss.backward()


def gradient_from_elsewhere(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    with optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()


def forward_outside(model, optimizer):
    loss = F.cross_entropy(model(X), Y)
    with optimizer.sampled():
        loss.backward()


def without_grad(model, optimizer):
    with torch.no_grad():
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))


def in_inference_mode(model, optimizer):
    with torch.inference_mode(), optimizer.sampled():
        pass


MISUSES = {
    step_without_sample: "no gradient sample was taken",
    too_few_samples: r"1 sample\(s\) were taken where mc_samples=3",
    nested: "inside a sampling block",
    step_inside: "cannot step inside",
    save_inside: "cannot save inside",
    posterior_inside: "cannot take the posterior inside",
    copy_inside: "cannot copy inside",
    backward_outside: "inside the block",
    gradient_from_elsewhere: "outside a sampled",
    forward_outside: "inside the block",
    without_grad: "switched off",
    in_inference_mode: "switched off",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__)
def test_calls_at_the_wrong_moment(misuse):
    model, optimizer = trained()
    before = learned(model, optimizer)
    with pytest.raises(CredoError, match=MISUSES[misuse]) as caught:
        misuse(model, optimizer)
    assert isinstance(caught.value, (RuntimeError, NotImplementedError))
    assert_unchanged(before, model, optimizer)


def test_two_threads_cannot_sample_one_model():
    model, optimizer = trained()
    failures = []

    def enter():
        try:
            with optimizer.sampled():
                pass
        except CallOrderError as error:
            failures.append(error)

    with optimizer.sampled():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "or another" in str(failures[0])


RETURNS = {
    "a float": (lambda model: 1.0, InvalidType, "got float"),
    "nothing": (lambda model: None, InvalidType, "got NoneType"),
    "no graph": (lambda model: torch.tensor(1.0), InvalidValue, "has no graph"),
    "a matrix": (lambda model: model(X), InvalidValue, r"\(6, 3\)"),
    "too few losses": (
        lambda model: F.cross_entropy(model(X), Y, reduction="none")[:3],
        InvalidValue,
        "3 losses",
    ),
    "integer inputs": (lambda model: model(Y), RuntimeError, ""),
    "labels out of range": (lambda model: F.cross_entropy(model(X), Y + 7), IndexError, "out of bounds"),
    "lengths differ": (lambda model: F.cross_entropy(model(X), Y[:2]), ValueError, "batch_size"),
}


@pytest.mark.parametrize("closure,kind,message", RETURNS.values(), ids=RETURNS.keys())
def test_what_a_closure_must_not_return(closure, kind, message):
    model, optimizer = trained()
    before = learned(model, optimizer)
    with pytest.raises(kind, match=message):
        optimizer.step(lambda: closure(model))
    assert_unchanged(before, model, optimizer)


def test_an_empty_batch_is_an_error():
    model, optimizer = trained()
    before = learned(model, optimizer)
    with pytest.raises(InvalidValue, match="empty"):
        optimizer.step(lambda: model(X[:0]).sum())
    assert_unchanged(before, model, optimizer)


def test_a_batch_larger_than_the_data_is_worth_a_warning():
    model = nn.Linear(4, 3)
    optimizer = credo.VOGN(model, data_size=5)
    with pytest.warns(UserWarning, match="6 examples, more than data_size=5"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
