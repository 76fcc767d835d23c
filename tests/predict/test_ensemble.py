"""Ensembles through `predict`: an equal mixture of members, whatever they are."""

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue
from tests.predict.models import around, generator


def rows() -> Tensor:
    return torch.randn(5, 4, generator=generator())


def small(seed: int, width: int = 6) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 3))


def test_networks_of_different_architectures_are_averaged() -> None:
    models = [small(0), small(1, width=9), nn.Linear(4, 3)]
    found = credo.predict(models[0], credo.Ensemble(models), rows(), keep_samples=True)
    with torch.no_grad():
        each = torch.stack([model.eval()(rows()).softmax(-1) for model in models])
    torch.testing.assert_close(found.samples, each)
    torch.testing.assert_close(found.probs, each.mean(0))


@pytest.mark.parametrize("vectorise", [None, True, False])
def test_an_ensemble_of_posteriors_is_their_mixture(vectorise: bool | None) -> None:
    model = small(0)
    members = [around(small(seed), variance=0.2) for seed in range(3)]
    found = credo.predict(
        model, credo.Ensemble(members), rows(), samples=4, keep_samples=True, vectorise=vectorise
    )
    assert found.samples.shape == (12, 5, 3)
    alone = credo.predict(model, members[0], rows(), samples=4, keep_samples=True)
    torch.testing.assert_close(found.samples[:4], alone.samples)
    torch.testing.assert_close(found.probs, found.samples.mean(0))
    same = credo.predict(model, credo.Ensemble(members), rows(), samples=4, vectorise=False)
    torch.testing.assert_close(found.probs, same.probs)


def test_equal_posteriors_draw_different_weights() -> None:
    model = small(0)
    q = around(model, variance=0.2)
    samples = credo.predict(model, credo.Ensemble([q, q]), rows(), samples=3, keep_samples=True).samples
    assert not torch.allclose(samples[:3], samples[3:])


def test_members_of_every_kind_weigh_the_same() -> None:
    model, other = small(0), small(1)
    q, dropout = around(model, variance=0.3), credo.DropoutPosterior(other)
    ensemble = credo.Ensemble([q, other, dropout, (other, "mean"), (other, around(other, variance=0.1))])
    found = credo.predict(model, ensemble, rows(), samples=5, keep_samples=True)
    point = credo.predict(other, "mean", rows()).probs
    parts = found.samples.view(5, 5, 5, 3).mean(1)
    torch.testing.assert_close(parts[0], credo.predict(model, q, rows(), samples=5).probs)
    torch.testing.assert_close(parts[1], point)
    torch.testing.assert_close(parts[3], point)
    torch.testing.assert_close(found.probs, parts.mean(0))


def test_regression_and_batches() -> None:
    models = [nn.Linear(4, 1) for _ in range(3)]
    ensemble, options = credo.Ensemble(models), {"task": "regression", "noise": 0.1}
    whole = credo.predict(models[0], ensemble, rows(), **options)
    split = credo.predict(models[0], ensemble, [rows()[:2], rows()[2:]], **options)
    torch.testing.assert_close(split.variance, whole.variance)
    with torch.no_grad():
        means = torch.stack([model(rows()) for model in models])
    torch.testing.assert_close(whole.variance, means.var(0, correction=0) + 0.1)


class Draws:
    """A user's own posterior that keeps to its own number of functions."""

    def functions(self, model: nn.Module, samples: int, seed: int, read: object, vectorise: object) -> object:
        return lambda batch: iter([(torch.zeros(2, 5, 3),)])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: credo.Ensemble([]), InvalidValue, "empty"),
        (lambda: credo.Ensemble(small(0)), InvalidType, "list of models"),
        (lambda: credo.Ensemble([small(0), "mean"]), InvalidType, r"members\[1\]"),
        (lambda: credo.Ensemble([3]), InvalidType, r"members\[0\].*int"),
        (lambda: credo.Ensemble([credo.Ensemble([small(0)])]), InvalidValue, "list its members"),
        (
            lambda: credo.predict(small(0), credo.Ensemble([nn.Linear(4, 3), nn.Linear(4, 2)]), rows()),
            InvalidValue,
            "disagree",
        ),
        (
            lambda: credo.predict(small(0), credo.Ensemble([Draws(), around(small(0))]), rows()),
            InvalidValue,
            "2 functions instead of 10",
        ),
    ],
)
def test_bad_input(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
