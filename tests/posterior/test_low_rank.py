"""Diagonal plus low rank against torch's dense multivariate normal, in float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from credo.errors import InvalidValue, UnsupportedOperation
from credo.posterior import DiagonalPosterior, KroneckerPosterior, LowRankPosterior, load_posterior

SHAPES: dict[str, tuple[int, ...]] = {"fc.weight": (3, 2), "bn.weight": (5,), "fc.bias": (3,)}
RANDOM = ("fc.weight", "fc.bias")
RANK = 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior(seed: int = 0, dtype: torch.dtype = torch.float64) -> LowRankPosterior:
    g = generator(seed)
    mean = {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in SHAPES.items()}
    diagonal = {name: torch.rand(SHAPES[name], generator=g, dtype=dtype) + 0.1 for name in RANDOM}
    factors = {name: torch.randn((RANK, *SHAPES[name]), generator=g, dtype=dtype) for name in RANDOM}
    return LowRankPosterior(mean, diagonal, factors, {"method": "SWAG"})


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in RANDOM])


def dense(q: LowRankPosterior) -> MultivariateNormal:
    factors = torch.cat([q.factors[name].flatten(1) for name in RANDOM], 1)
    return MultivariateNormal(flat(q.mean), flat(q.diagonal).diag() + factors.T @ factors)


def test_moments_and_densities_are_those_of_the_dense_gaussian() -> None:
    q, truth = posterior(), dense(posterior())
    torch.testing.assert_close(flat(q.variance), truth.variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.entropy(), truth.entropy(), rtol=1e-12, atol=0)
    weights = q.sample(generator(3))
    torch.testing.assert_close(q.log_prob(weights), truth.log_prob(flat(weights)), rtol=1e-12, atol=0)
    assert q.deterministic == {"bn.weight"}
    assert not q.variance["bn.weight"].any()


def test_kl_is_exact() -> None:
    q, truth = posterior(), dense(posterior())
    p = DiagonalPosterior(posterior(1).mean, posterior(1).diagonal)
    other = MultivariateNormal(flat(p.mean), flat({n: p.variance[n] for n in RANDOM}).diag())
    torch.testing.assert_close(q.kl(p), kl_divergence(truth, other), rtol=1e-12, atol=0)
    width = len(flat(q.mean))
    prior = MultivariateNormal(torch.zeros(width).double(), torch.eye(width).double() / 2.5)
    torch.testing.assert_close(q.kl(2.5), kl_divergence(truth, prior), rtol=1e-12, atol=0)


def test_kl_to_what_is_not_diagonal_names_the_remedy() -> None:
    q = posterior()
    with pytest.raises(UnsupportedOperation, match="use DiagonalPosterior"):
        q.kl(KroneckerPosterior(q.mean, {}, q.diagonal))


def test_draws_have_the_covariance() -> None:
    q, n = posterior(), 40_000
    draws = q.sample_many(generator(), n)
    away = torch.cat([(draws[name] - q.mean[name]).flatten(1) for name in RANDOM], 1)
    truth = dense(q).covariance_matrix
    scale = truth.diagonal().sqrt()
    error = (away.T @ away / n - truth) / scale[:, None] / scale
    assert error.abs().max() < 5 / n**0.5 * 1.5
    assert torch.equal(draws["bn.weight"][7], q.mean["bn.weight"])


def test_draws_do_not_depend_on_how_many_are_taken_at_a_time() -> None:
    q, one, many = posterior(), generator(), generator()
    together = q.sample_many(many, 3)
    for k in range(3):
        single = q.sample(one)
        assert all(torch.equal(single[name], together[name][k]) for name in SHAPES)
    assert q.sample_many(one, 0)["fc.weight"].shape == (0, 3, 2)


def test_the_dense_covariance_of_a_layer_is_column_stacked() -> None:
    q, truth = posterior(), dense(posterior()).covariance_matrix
    order = [row * 2 + column for column in range(2) for row in range(3)] + [6, 7, 8]
    torch.testing.assert_close(q.dense_covariance("fc"), truth[order][:, order])
    torch.testing.assert_close(q.dense_covariance("fc.bias"), truth[6:, 6:])
    assert not q.dense_covariance("bn.weight").any()


def test_files_and_devices(tmp_path: Path) -> None:
    q = posterior(dtype=torch.float32)
    q.save(tmp_path / "q")
    for other in (load_posterior(tmp_path / "q"), q.to("cpu")):
        assert isinstance(other, LowRankPosterior)
        assert other.metadata == q.metadata
        assert list(other.tensors()) == list(q.tensors())
        assert all(
            torch.equal(a, b) for a, b in zip(other.tensors().values(), q.tensors().values(), strict=True)
        )
        mine, theirs = (p.sample(generator(1)) for p in (q, other))
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


BAD = {
    "another rank": ({"fc.bias": torch.zeros(2, 3)}, "one rank for all names"),
    "another shape": ({"fc.bias": torch.zeros(RANK, 4)}, "has shape \\(4,\\) instead of \\(3,\\)"),
    "not finite": ({"fc.bias": torch.full((RANK, 3), torch.nan)}, "not finite"),
    "of a deterministic name": ({"bn.weight": torch.zeros(RANK, 5)}, "'bn.weight' is unexpected"),
}


@pytest.mark.parametrize("name", BAD)
def test_factors_that_do_not_fit_are_refused(name: str) -> None:
    q, (change, message) = posterior(), BAD[name]
    with pytest.raises(InvalidValue, match=message):
        LowRankPosterior(q.mean, q.diagonal, {**q.factors, **change})


def test_no_rank_at_all_is_refused() -> None:
    q = posterior()
    with pytest.raises(InvalidValue, match="use DiagonalPosterior"):
        LowRankPosterior(q.mean, q.diagonal, {})
