"""EWC: exact Fisher information, and penalties against the plain sum they stand for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.continual import EWC, fisher
from credo.errors import InvalidType, InvalidValue
from tests.continual.streams import CLASSES, FEATURES, classification, network


def sgd(model: nn.Module, **options: float) -> EWC:
    return EWC(torch.optim.SGD(model.parameters(), 0.1), model, **{"strength": 3.0, **options})


def importances(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=generator) for name, p in model.named_parameters()}


def move(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("online", [None, 0.7])
def test_the_pull_of_three_tasks(online):
    model = network()
    ewc, held = sgd(model, online=online), []
    for k in range(3):
        place, weight = move(model, k), importances(model, k)
        ewc.consolidate(weight)
        held.append((weight, place))
    if online is not None:  # F ← decay·F + Fₜ, around the newest place
        decayed = {n: sum(online ** (2 - k) * w[n] for k, (w, _) in enumerate(held)) for n in held[0][0]}
        held = [(decayed, held[-1][1])]
    move(model, 9)
    loss = sum(
        1.5 * (weight[name] * (p - place[name]).square()).sum()
        for weight, place in held
        for name, p in model.named_parameters()
    )
    expected = torch.autograd.grad(loss, list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ewc.step()
    for p, old, pull in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * pull, rtol=1e-4, atol=1e-5)


def test_a_closure_returns_the_penalised_loss_and_one_penalty_is_exact():
    model = network()
    ewc, place = sgd(model), move(model, 0)
    weight = importances(model, 0)
    ewc.consolidate(weight)
    now = move(model, 1)

    def closure():
        ewc.zero_grad()
        loss = model(torch.ones(2, FEATURES)).square().mean()
        loss.backward()
        return loss

    plain = model(torch.ones(2, FEATURES)).square().mean().item()
    penalty = sum((1.5 * weight[n] * (now[n] - place[n]).square()).sum().item() for n in now)
    assert ewc.penalty().item() == pytest.approx(penalty, rel=1e-4)
    assert float(ewc.step(closure)) == pytest.approx(plain + penalty, rel=1e-4)


@pytest.mark.parametrize("labels", ["data", "model"])
def test_fisher_against_a_loop_over_examples(labels):
    model, task = network().double(), classification(0)
    x, y = task.inputs[:20].double(), task.targets[:20]
    found = fisher(model, [(x[:13], y[:13]), (x[13:], y[13:])], labels=labels)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.multinomial(F.softmax(model(part), -1), 1, generator=generator)[:, 0]
        for part in (x[:13], x[13:])
    ]
    used = y if labels == "data" else torch.cat(drawn)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for k in range(20):
        loss = F.cross_entropy(model(x[k : k + 1]), used[k : k + 1])
        for (name, _), g in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            expected[name] += g.square() / 20
    torch.testing.assert_close(found, expected)
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_fisher_leaves_the_global_stream_alone():
    model = network()
    state = torch.get_rng_state()
    fisher(model, [(torch.ones(2, FEATURES), torch.zeros(2, dtype=torch.long))])
    assert torch.equal(state, torch.get_rng_state())


def test_resumes_exactly():
    one, other = network(), network(1)
    ewc = EWC(torch.optim.Adam(one.parameters()), one, strength=10.0)
    ewc.consolidate(importances(one, 0))
    restored = EWC(torch.optim.Adam(other.parameters()), other, strength=10.0)
    other.load_state_dict(one.state_dict())
    restored.load_state_dict(ewc.state_dict())
    for model, optimizer in ((one, ewc), (other, restored)):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, FEATURES)).sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_free_weight_is_not_held():
    model = nn.Linear(2, 1, bias=False)
    ewc = sgd(model)
    for _ in range(2):
        ewc.consolidate({"weight": torch.tensor([[1.0, 0.0]])})
        with torch.no_grad():
            model.weight += 1
    assert torch.isfinite(ewc.centre["weight"]).all()
    model.weight.grad = torch.zeros(1, 2)
    before = model.weight.detach().clone()
    ewc.step()
    assert model.weight[0, 1] == before[0, 1]
    assert model.weight[0, 0] < before[0, 0]


@pytest.mark.parametrize(
    ("importance", "words"),
    [
        ({"weight": torch.tensor([[1.0, -1.0]])}, "finite and ≥ 0"),
        ({"weight": torch.tensor([[1.0, math.nan]])}, "finite and ≥ 0"),
        ({"weight": torch.ones(3)}, "shape"),
        ({"wait": torch.ones(1, 2)}, "'wait'"),
    ],
)
def test_bad_importance_changes_nothing(importance, words):
    model = nn.Linear(2, 1, bias=False)
    ewc = sgd(model)
    with pytest.raises(InvalidValue, match=words):
        ewc.consolidate(importance)
    assert ewc.importance == {}
    assert ewc.centre == {}


@pytest.mark.parametrize(
    ("name", "value"), [("strength", -1.0), ("strength", math.nan), ("online", 0.0), ("online", 2)]
)
def test_bad_numbers(name, value):
    with pytest.raises(InvalidValue, match=name):
        sgd(nn.Linear(2, 2), **{name: value})


def test_what_is_wrapped_must_be_an_optimiser_and_fisher_needs_examples():
    with pytest.raises(InvalidType, match="optimizer"):
        EWC(credo.VOGN, nn.Linear(2, 2), strength=1.0)
    with pytest.raises(InvalidValue, match="empty"):
        fisher(nn.Linear(FEATURES, CLASSES), [])
