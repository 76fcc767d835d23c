"""Every method's posterior is a prior: for the method itself, and from a file for VOGN. Old tasks are kept with it."""

from functools import cache

import pytest
import torch

import credo
from credo import metrics
from credo.continual import Variational, learn
from tests.continual.streams import METHODS, classification, network, vogn

FIRST, SECOND = classification(0), classification(1)


@cache
def after_the_first(name: str) -> credo.Posterior:
    learner = Variational(network(), METHODS[name])
    learn(learner, [FIRST], epochs=20, batch_size=15)
    return learner.posterior


def after_both(make, before: credo.Posterior, *, remembering: bool) -> Variational:
    """From the mean of the first posterior either way; only one of them has it as its prior."""
    chosen = make if remembering else lambda model, n, prior, seed: make(model, n, None, seed)
    learner = Variational(network(), chosen, start="mean", posterior=before)
    learn(learner, [SECOND], epochs=20, batch_size=15)
    return learner


def assert_the_prior_keeps_the_first(make, before: credo.Posterior) -> None:
    keeps, forgets = (after_both(make, before, remembering=memory) for memory in (True, False))
    lost, kept = (metrics.nll(learner.predict(FIRST), FIRST.test_targets) for learner in (forgets, keeps))
    assert kept < 0.4 * lost
    assert metrics.accuracy(keeps.predict(FIRST), FIRST.test_targets) > 0.9
    assert metrics.accuracy(keeps.predict(SECOND), SECOND.test_targets) > 0.9


@pytest.mark.parametrize("name", METHODS)
def test_a_method_continues_from_its_own_posterior(name):
    assert_the_prior_keeps_the_first(METHODS[name], after_the_first(name))


@pytest.mark.parametrize("name", METHODS)
def test_vogn_continues_from_every_saved_posterior(name, tmp_path):
    after_the_first(name).save(tmp_path / "yesterday")
    assert_the_prior_keeps_the_first(vogn, credo.load_posterior(tmp_path / "yesterday"))


@pytest.mark.parametrize("name", METHODS)
def test_vogn_takes_the_optimisers_own_posterior_from_a_file(name, tmp_path):
    """Without credo.continual: what a Kronecker posterior gives is its mean and its marginal variances."""
    model = network()
    optimizer = METHODS[name](model, 90, None, 0)
    optimizer.step(lambda: torch.nn.functional.cross_entropy(model(FIRST.inputs), FIRST.targets))
    posterior = optimizer.posterior()
    posterior.save(tmp_path / "yesterday")
    today = credo.VOGN(
        model,
        data_size=90,
        prior=credo.load_posterior(tmp_path / "yesterday"),
        initial_precision=1e-6,
        damping=0.0,
    )
    for weight, variance in today.posterior().variance.items():
        torch.testing.assert_close(variance, posterior.variance[weight], rtol=1e-4, atol=0)
