"""Heads come and go; a posterior becomes a prior, also for weights it has never met."""

import pytest
import torch
from torch import nn

import credo
from credo.continual import MultiHead, Variational, learn, merged, prior_for, reset_parameters
from credo.errors import CallOrderError, InvalidType, InvalidValue
from tests.continual.streams import CLASSES, FEATURES, classification, network, vogn, weights, with_heads


def posterior_of(model: nn.Module, variance: float = 0.5) -> credo.DiagonalPosterior:
    mean = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return credo.DiagonalPosterior(mean, {name: torch.full_like(p, variance) for name, p in mean.items()})


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_only_the_head_in_use_answers_and_trains():
    model, x = with_heads(), torch.ones(2, FEATURES)
    first = model.arrive("first")(x)
    second = model.arrive("second")(x)
    assert not torch.equal(first, second)
    assert trained(model) == {"body.0.weight", "body.0.bias", "heads.second.weight", "heads.second.bias"}
    assert torch.equal(model.use("first")(x), first)
    assert "heads.first.weight" in trained(model)


@pytest.mark.parametrize("name", ["", "a.b", "keys", "here", None])
def test_heads_that_cannot_be(name):
    model = with_heads()
    model.arrive("here")
    before = weights(model)
    with pytest.raises(InvalidValue, match="head"):
        model.add_head(name, nn.Linear(12, 2))
    assert weights(model).keys() == before.keys()
    assert model.used == "here"


def test_heads_that_are_not():
    model = MultiHead(nn.Linear(2, 2))
    with pytest.raises(CallOrderError, match="add_head"):
        model(torch.ones(1, 2))
    with pytest.raises(InvalidValue, match=r"'b'.*'a'"):
        model.add_head("a", nn.Linear(2, 2)).arrive("b")
    with pytest.raises(InvalidType, match="module"):
        model.add_head("c", 3)
    assert model.used == "a"


def test_a_prior_for_a_new_head():
    model = with_heads()
    model.arrive("first")
    old = posterior_of(model)
    model.arrive("second")
    prior = prior_for(model, old, precision=4.0)
    assert prior.mean.keys() == trained(model)
    assert torch.equal(prior.mean["body.0.weight"], old.mean["body.0.weight"])
    assert torch.equal(prior.mean["heads.second.bias"], torch.zeros(CLASSES))
    assert torch.equal(prior.variance["heads.second.bias"], torch.full((CLASSES,), 0.25))
    assert prior_for(model, None) is None
    both = merged(old, prior)
    assert both.mean.keys() == old.mean.keys() | prior.mean.keys()
    assert torch.equal(both.variance["heads.first.weight"], old.variance["heads.first.weight"])


def test_priors_that_do_not_fit():
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidValue, match=r"knows .*layer"):
        prior_for(model, credo.DiagonalPosterior({"layer": torch.ones(2)}, {"layer": torch.ones(2)}))
    with pytest.raises(InvalidValue, match=r"weight.*\(4, 2\).*\(2, 3\)"):
        prior_for(model, credo.DiagonalPosterior({"weight": torch.ones(4, 2)}, {"weight": torch.ones(4, 2)}))
    with pytest.raises(InvalidType, match="posterior"):
        prior_for(model, 1.0)
    for precision in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValue, match="precision"):
            prior_for(model, None, precision)


def test_a_fresh_start_is_torchs_own_and_private():
    model = network()
    state, before = torch.get_rng_state(), weights(model)
    reset_parameters(model, 3)
    assert torch.equal(state, torch.get_rng_state())
    once = weights(model)
    assert not any(torch.equal(before[name], once[name]) for name in once)
    assert once["0.weight"].abs().max() <= FEATURES**-0.5
    reset_parameters(model, 3)
    assert all(torch.equal(once[name], tensor) for name, tensor in weights(model).items())


def test_a_layer_without_a_fresh_start_is_named():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Linear(3, 3), Scale())
    before = weights(model)
    with pytest.raises(InvalidType, match="Scale"):
        reset_parameters(model, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())


@pytest.mark.parametrize(
    "posterior",
    [
        posterior_of(nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))),
        posterior_of(nn.Linear(2, 2)),
    ],
    ids=["shapes", "names"],
)
@pytest.mark.parametrize("start", ["fresh", "mean"])
def test_a_posterior_of_another_model_changes_nothing(start, posterior):
    model = network()
    learner, before = Variational(model, vogn, start=start, posterior=posterior), weights(model)
    with pytest.raises(InvalidValue, match="does not fit the model"):
        learner.begin(classification(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())
    learner.posterior = None
    learner.begin(classification(0))


@pytest.mark.parametrize("start", ["fresh", "mean"])
def test_a_finished_head_stays_as_it_was_believed(start):
    model = with_heads()
    learner = Variational(model, vogn, start=start)
    tasks = [classification(k, head=f"head_{k}") for k in range(2)]
    learn(learner, tasks[:1], epochs=3, batch_size=30)
    first = learner.posterior
    learner.begin(tasks[1])
    learner.step(tasks[1].inputs[:30], tasks[1].targets[:30])
    learner.finish(tasks[1])
    for name in ("heads.head_0.weight", "heads.head_0.bias"):
        assert torch.equal(first.mean[name], learner.posterior.mean[name])
        assert torch.equal(first.variance[name], learner.posterior.variance[name])
    assert "heads.head_1.weight" in learner.posterior.mean


def test_unknown_heads_change_nothing():
    model = MultiHead(nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU()))
    model.add_head("known", nn.Linear(12, CLASSES))
    learner, before = Variational(model, vogn), weights(model)
    with pytest.raises(InvalidValue, match=r"'other'.*'known'"):
        learner.begin(classification(0, head="other"))
    with pytest.raises(InvalidValue, match="names no head"):
        learner.begin(classification(0))
    with pytest.raises(InvalidValue, match="has none"):
        Variational(network(), vogn).begin(classification(0, head="known"))
    assert model.used == "known"
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())
    learner.begin(classification(0, head="known"))


def test_a_bad_optimiser_takes_its_new_head_back():
    model = with_heads()
    model.arrive("first")
    before = weights(model)
    learner = Variational(model, lambda *_: credo.VOGN(model, -1.0, data_size=3))
    with pytest.raises(InvalidValue, match="lr"):
        learner.begin(classification(0, head="second"))
    assert weights(model).keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())
    assert model.used == "first"
