"""A posterior whose covariance is multiplied by a number: everything else follows from the dense Gaussian."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence

import credo
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior import DiagonalPosterior, KroneckerPosterior, Posterior
from tests.posterior import test_diagonal as diagonal
from tests.posterior import test_kronecker as kronecker

KINDS = {
    "diagonal": (diagonal.posterior, diagonal.as_distribution, ("fc", "fc.bias")),
    "kronecker, one scale a layer": (kronecker.posterior, kronecker.dense, tuple(kronecker.LAYERS)),
    "kronecker, a scale a weight": (
        lambda seed=0: kronecker.posterior(seed, "eigen"),
        kronecker.dense,
        tuple(kronecker.LAYERS),
    ),
}
EACH = pytest.mark.parametrize("kind", KINDS)


@EACH
@pytest.mark.parametrize("factor", [0.25, 1, 4.0, 7.3])
def test_the_covariance_is_multiplied_and_the_mean_kept(kind: str, factor: float) -> None:
    make, dense, layers = KINDS[kind]
    q, wide = make(), make().scaled(factor)
    assert type(wide) is type(q)
    assert all(torch.equal(wide.mean[name], mean) for name, mean in q.mean.items())
    assert list(wide.mean) == list(q.mean)
    assert wide.deterministic == q.deterministic
    for name in q.variance:
        torch.testing.assert_close(wide.variance[name], factor * q.variance[name], rtol=1e-12, atol=0)
    for name in layers:
        torch.testing.assert_close(
            wide.dense_covariance(name), factor * q.dense_covariance(name), rtol=1e-10, atol=1e-14
        )
    other = make(1)
    truth = kl_divergence(dense(wide), dense(other))
    torch.testing.assert_close(wide.kl(other), truth, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(wide.entropy(), dense(wide).entropy(), rtol=1e-9, atol=1e-9)
    size = sum(mean.numel() for name, mean in q.mean.items() if name not in q.deterministic)
    torch.testing.assert_close(
        wide.entropy() - q.entropy(), torch.tensor(size * math.log(factor) / 2).double()
    )


@EACH
def test_draws_use_the_same_noise(kind: str) -> None:
    """w = μ + √factor·(w₀ − μ): what makes the validation NLL a smooth function of the factor."""
    q = KINDS[kind][0]()
    draws, wide = (p.sample_many(torch.Generator().manual_seed(3), 4) for p in (q, q.scaled(4)))
    for name, mean in q.mean.items():
        torch.testing.assert_close(wide[name] - mean, 2 * (draws[name] - mean), rtol=1e-9, atol=1e-12)


@EACH
def test_factors_multiply_and_are_remembered_also_in_a_file(kind: str, tmp_path: Path) -> None:
    q = KINDS[kind][0]()
    twice = q.scaled(3.0).scaled(2.0)
    assert twice.metadata["scale"] == 6.0
    assert twice.metadata["method"] == q.metadata["method"]
    assert "scale" not in q.metadata
    twice.save(tmp_path / "q")
    loaded = credo.load_posterior(tmp_path / "q")
    assert loaded.metadata == twice.metadata
    for name, variance in twice.variance.items():
        assert torch.equal(loaded.variance[name], variance)
        torch.testing.assert_close(variance, 6 * q.variance[name], rtol=1e-12, atol=0)


@EACH
@pytest.mark.parametrize(
    ("factor", "error"),
    [(0, InvalidValue), (-1.0, InvalidValue), (math.nan, InvalidValue), (math.inf, InvalidValue)]
    + [(value, InvalidType) for value in (True, "2", None, torch.ones(2))],
)
def test_a_factor_that_makes_no_sense(kind: str, factor: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="factor"):
        KINDS[kind][0]().scaled(factor)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_variances_that_leave_the_range_are_refused_and_not_certain(factor: float) -> None:
    q = DiagonalPosterior({"w": torch.ones(2)}, {"w": torch.tensor([1e-20, 1e20])})
    with pytest.raises(InvalidValue, match=r"factor=1e.*'w' out of the range of torch.float32"):
        q.scaled(factor)


def test_without_variances_there_is_nothing_to_scale() -> None:
    certain = DiagonalPosterior({"w": torch.ones(2)}, {})
    with pytest.raises(InvalidValue, match=r"deterministic.*temperature"):
        certain.scaled(2.0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    with pytest.raises(UnsupportedOperation, match="dropout rate"):
        credo.DropoutPosterior(model).scaled(2.0)
    with pytest.raises(UnsupportedOperation, match=r"Ensemble.*members"):
        credo.Ensemble([model]).scaled(2.0)


def test_a_kind_that_cannot_says_so() -> None:
    assert "_scaled" in vars(DiagonalPosterior)
    assert "_scaled" in vars(KroneckerPosterior)
    with pytest.raises(UnsupportedOperation, match="cannot be scaled"):
        Posterior._scaled(DiagonalPosterior({"w": torch.ones(1)}, {}), 2.0)
