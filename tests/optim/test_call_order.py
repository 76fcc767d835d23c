"""Calls at the wrong moment, and closures that return the wrong thing, are refused and change nothing."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue
from tests.optim.trained import X, Y, assert_unchanged, learned, trained

METHODS = [credo.VOGN, credo.BayesByBackprop, credo.IVON, credo.KFAC, credo.NoisyKFAC]


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
    with optimizer.sampled():
        copy.deepcopy(optimizer)


def backward_outside(model, optimizer):
    with optimizer.sampled():
        loss = F.cross_entropy(model(X), Y)
    loss.backward()


def gradient_added_to_a_leftover(model, optimizer):
    F.cross_entropy(model(X), Y).backward()  # into the gradient that the last step has left
    with optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()


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
    gradient_added_to_a_leftover: "outside a sampled",
    forward_outside: "inside the block",
    without_grad: "switched off",
    in_inference_mode: "switched off",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_calls_at_the_wrong_moment(method, misuse):
    model, optimizer = trained(method)
    before, told_by_torch = learned(model, optimizer), method is credo.IVON and misuse is backward_outside
    kind, message = (RuntimeError, "inplace") if told_by_torch else (CredoError, MISUSES[misuse])
    with pytest.raises(kind, match=message) as caught:
        misuse(model, optimizer)
    assert isinstance(caught.value, (RuntimeError, NotImplementedError))
    assert_unchanged(before, model, optimizer)


def test_two_threads_cannot_sample_one_model():
    _, optimizer = trained()
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
    "integer inputs": (lambda model: model(Y), RuntimeError, "dtype"),
    "labels out of range": (lambda model: F.cross_entropy(model(X), Y + 7), IndexError, "out of bounds"),
    "lengths differ": (lambda model: F.cross_entropy(model(X), Y[:2]), ValueError, "batch_size"),
}


@pytest.mark.parametrize(("closure", "kind", "message"), RETURNS.values(), ids=RETURNS.keys())
@pytest.mark.parametrize("method", METHODS)
def test_what_a_closure_must_not_return(method, closure, kind, message):
    model, optimizer = trained(method)
    before = learned(model, optimizer)
    with pytest.raises(kind, match=message):
        optimizer.step(lambda: closure(model))
    assert_unchanged(before, model, optimizer)


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_an_error(method):
    model, optimizer = trained(method)
    before = learned(model, optimizer)
    with pytest.raises(InvalidValue, match="empty"):
        optimizer.step(lambda: model(X[:0]).sum())
    assert_unchanged(before, model, optimizer)
