"""A posterior carries the module's buffers: a fresh model predicts as the trained one did."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior, KroneckerPosterior
from credo.posterior import files as posterior_files
from credo.posterior.elbo import elbo
from tests.predict.models import Net, around, generator, images

OPTIMISERS = [credo.VOGN, credo.OGN, credo.IVON, credo.KFAC, credo.NoisyKFAC, credo.BayesByBackprop]


def trained(kind: type = credo.VOGN) -> tuple[nn.Module, credo.Posterior]:
    model, x = Net(), 3 + 2 * images(12)
    optimizer = kind(model, data_size=12)
    for part in x.split(6):
        with optimizer.sampled():
            F.cross_entropy(model(part), torch.arange(6) % 3).backward()
        optimizer.step()
    return model, optimizer.posterior()


@pytest.mark.parametrize("kind", OPTIMISERS, ids=lambda kind: kind.__name__)
def test_a_fresh_model_predicts_as_the_trained_one(kind: type, tmp_path: Path) -> None:
    model, q = trained(kind)
    q.save(tmp_path / "q")
    truth = credo.predict(model, q, images())
    fresh = Net()
    before = copy.deepcopy(fresh.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = credo.predict(fresh, credo.load_posterior(tmp_path / "q"), images())
    assert torch.equal(found.probs, truth.probs)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_they_are_copies_of_what_state_dict_has() -> None:
    model, q = trained()
    names = [name for name in model.state_dict() if name not in dict(model.named_parameters())]
    assert list(q.buffers) == names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert q.buffers["norm.num_batches_tracked"].dtype == torch.int64
    mean = q.buffers["norm.running_mean"].clone()
    model.norm.running_mean.zero_()  # type: ignore[union-attr,operator]
    assert torch.equal(q.buffers["norm.running_mean"], mean)
    model.register_buffer("table", torch.ones(3), persistent=False)
    assert list(q.with_buffers(model).buffers) == names


@pytest.mark.parametrize("kind", [credo.VOGN, credo.NoisyKFAC], ids=["diagonal", "kronecker"])
def test_they_go_wherever_the_posterior_goes(kind: type, tmp_path: Path) -> None:
    _, q = trained(kind)
    assert isinstance(q, DiagonalPosterior | KroneckerPosterior)
    q.save(tmp_path / "q")
    for other in (q.scaled(2.0), q.to("cpu"), credo.load_posterior(tmp_path / "q"), copy.deepcopy(q)):
        assert all(torch.equal(other.buffers[name], buffer) for name, buffer in q.buffers.items())
        assert other.buffers.keys() == q.buffers.keys()
        assert [b.dtype for b in other.buffers.values()] == [b.dtype for b in q.buffers.values()]
    assert all(torch.equal(q.scaled(1.0).mean[name], mean) for name, mean in q.mean.items())


@pytest.mark.parametrize("vectorise", [False, True])
def test_others_can_be_chosen(vectorise: bool) -> None:
    model, q = trained()
    moved = copy.deepcopy(model)
    moved.norm.running_mean += 5  # type: ignore[union-attr,operator]
    how = {"samples": 8, "vectorise": vectorise}
    own = credo.predict(moved, q, images(), **how).probs
    assert torch.equal(own, credo.predict(model, q, images(), **how).probs)
    other = credo.predict(model, q.with_buffers(moved), images(), **how).probs
    without = credo.predict(moved, q.with_buffers({}), images(), **how).probs
    assert torch.equal(other, without)
    assert not torch.allclose(other, own)


def test_the_mixture_of_an_ensemble_uses_those_of_each_member() -> None:
    (model, q), (other, p) = trained(), trained()
    both = credo.predict(model, credo.Ensemble([q, p]), images())
    pairs = credo.predict(model, credo.Ensemble([(model, q), (other, p)]), images())
    torch.testing.assert_close(both.probs, pairs.probs)


def test_the_elbo_uses_them_too() -> None:
    model, q = trained()
    loss = lambda m: F.cross_entropy(m(images()), torch.zeros(6).long())  # noqa: E731
    assert elbo(Net(), q, loss, data_size=12).expected_nll == elbo(model, q, loss, data_size=12).expected_nll


def test_a_file_of_the_first_format_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, q = trained()
    monkeypatch.setattr(posterior_files, "FORMAT_VERSION", 1)
    q.with_buffers({}).save(tmp_path / "old")
    monkeypatch.undo()
    assert b'"credo.format":"1"' in (tmp_path / "old").read_bytes()
    loaded = credo.load_posterior(tmp_path / "old")
    assert loaded.buffers == {}
    with pytest.warns(UserWarning, match=r"no buffers, and 'norm'.*load_state_dict"):
        credo.predict(Net(), loaded, images())


def test_no_warning_for_statistics_that_were_learnt() -> None:
    model, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.predict(model, around(model), images())
        credo.predict(nn.Linear(3, 2), around(nn.Linear(3, 2)), torch.randn(2, 3, generator=generator()))


def test_buffers_that_do_not_fit_are_refused() -> None:
    model, q = trained()
    fits: dict[str, Tensor] = q.buffers
    with pytest.raises(InvalidValue, match=r"no buffer 'elsewhere'.*with_buffers"):
        credo.predict(model, q.with_buffers({**fits, "elsewhere": torch.ones(1)}), images())
    with pytest.raises(InvalidValue, match=r"'norm.running_mean' is \(2,\)"):
        credo.predict(model, q.with_buffers({**fits, "norm.running_mean": torch.ones(2)}), images())
    with pytest.raises(InvalidType, match="buffers"):
        q.with_buffers([1])  # type: ignore[arg-type]


def test_frozen_weights_are_carried_too(tmp_path: Path) -> None:
    """A fresh model has others, and nothing would tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    optimizer, x = credo.VOGN(model, data_size=12), torch.randn(12, 4)
    optimizer.step(lambda: F.cross_entropy(model(x), torch.arange(12) % 3))
    q = optimizer.posterior()
    q.save(tmp_path / "q")
    truth = credo.predict(model, q, x)
    fresh = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    there = fresh[0].weight.clone()
    again = credo.predict(fresh, credo.load_posterior(tmp_path / "q"), x)
    assert torch.equal(again.probs, truth.probs)
    assert torch.equal(fresh[0].weight, there)
    assert set(q.buffers) == {"0.weight", "0.bias"}


def test_weights_that_were_frozen_later_are_carried_or_believed_in() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = credo.VOGN(model, data_size=12)
    optimizer.step(lambda: F.cross_entropy(model(torch.ones(6, 4)), torch.arange(6) % 3))
    model[0].requires_grad_(False)
    q = optimizer.posterior()
    assert set(q.mean) | set(q.buffers) == {name for name, _ in model.named_parameters()}
