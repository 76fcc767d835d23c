"""The diagonal Gaussian against torch.distributions and against its own definition."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from credo import kernels
from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior(seed: int = 0, dtype: torch.dtype = torch.float64) -> DiagonalPosterior:
    """Two random tensors, and a deterministic one between them."""
    g = generator(seed)
    mean = {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in SHAPES.items()}
    variance = {name: torch.rand(SHAPES[name], generator=g, dtype=dtype) + 0.1 for name in RANDOM}
    return DiagonalPosterior(mean, variance, {"method": "VOGN", "data_size": 100})


SHAPES: dict[str, tuple[int, ...]] = {"fc.weight": (3, 4), "bn.weight": (5,), "fc.bias": (3,)}
RANDOM = ("fc.weight", "fc.bias")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in RANDOM])


def as_distribution(q: DiagonalPosterior) -> Independent:
    return Independent(Normal(flat(q.mean), flat(q.variance).sqrt()), 1)


def test_kl_to_another_posterior_is_exact() -> None:
    q, p = posterior(0), posterior(1)
    truth = kl_divergence(as_distribution(q), as_distribution(p))
    torch.testing.assert_close(q.kl(p), truth, rtol=1e-12, atol=0)
    assert float(q.kl(q)) == 0.0


@given(st.floats(1e-6, 1e6))
def test_kl_to_a_precision_is_exact(precision: float) -> None:
    q = posterior()
    zero = torch.zeros_like(flat(q.mean))
    truth = kl_divergence(as_distribution(q), Independent(Normal(zero, zero + precision**-0.5), 1))
    torch.testing.assert_close(q.kl(precision), truth, rtol=1e-10, atol=0)


def test_kl_keeps_its_digits_when_posterior_and_prior_almost_agree() -> None:
    excess = 1e-9
    q = DiagonalPosterior({"w": torch.zeros(1).double()}, {"w": torch.tensor([1 + excess]).double()})
    assert 0 <= float(q.kl(1.0)) < excess


def test_entropy_and_log_prob_are_exact() -> None:
    q = posterior()
    weights = q.sample(generator(3))
    torch.testing.assert_close(q.entropy(), as_distribution(q).entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        q.log_prob(weights), as_distribution(q).log_prob(flat(weights)), rtol=1e-12, atol=0
    )


def test_samples_have_the_moments_of_the_posterior() -> None:
    q, n = posterior(dtype=torch.float32), 20_000
    draws = q.sample_many(generator(5), n)
    joint = torch.cat([draws[name].flatten(1) for name in RANDOM], 1).double()
    centred = (joint - flat(q.mean)) / flat(q.variance).sqrt()
    z_means = centred.mean(0) * math.sqrt(n)
    covariance = centred.T @ centred / n
    z_covariance = (
        (covariance - torch.eye(len(covariance))) * math.sqrt(n) / (1 + torch.eye(len(covariance))).sqrt()
    )
    assert float(z_means.abs().max()) < 5
    assert float(z_covariance.abs().max()) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_how_many_are_taken_at_a_time(dtype: torch.dtype) -> None:
    q = posterior(dtype=dtype)
    together = q.sample_many(generator(2), 7)
    split = generator(2)
    apart = [q.sample_many(split, n) for n in (1, 2, 3)] + [{k: v[None] for k, v in q.sample(split).items()}]
    for name in SHAPES:
        assert torch.equal(together[name], torch.cat([part[name] for part in apart]))


def test_draws_are_those_of_the_plain_torch_twin() -> None:
    q = posterior(dtype=torch.float32)
    with kernels.forced("off"):
        twin = q.sample_many(generator(2), 3)
    for name, draw in q.sample_many(generator(2), 3).items():
        torch.testing.assert_close(draw, twin[name], rtol=1e-5, atol=1e-6)


def test_deterministic_names_are_their_mean_and_count_for_nothing() -> None:
    q = posterior()
    without = DiagonalPosterior(
        {name: q.mean[name] for name in RANDOM}, {name: q.variance[name] for name in RANDOM}
    )
    assert q.deterministic == {"bn.weight"}
    assert torch.equal(q.variance["bn.weight"], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(q.sample(generator())["bn.weight"], q.mean["bn.weight"])
    assert torch.equal(q.kl(2.0), without.kl(2.0))
    assert torch.equal(q.entropy(), without.entropy())
    assert DiagonalPosterior(q.mean, q.variance).deterministic == q.deterministic


def test_a_posterior_without_any_variance_draws_its_mean() -> None:
    certain = DiagonalPosterior(posterior().mean, {})
    draws = certain.sample_many(generator(), 3)
    assert all(torch.equal(draws[name], mean.expand(3, *mean.shape)) for name, mean in certain.mean.items())


def test_a_sample_belongs_to_its_owner() -> None:
    q = posterior()
    before = q.mean["bn.weight"].clone()
    q.sample(generator())["bn.weight"].zero_()
    assert torch.equal(q.mean["bn.weight"], before)


def test_the_posterior_remembers_nothing_of_where_it_came_from() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    metadata: dict[str, object] = {"step": [1]}
    q = DiagonalPosterior({"w": weight}, {"w": torch.ones(2)}, metadata)
    with torch.no_grad():
        weight.zero_()
    metadata["step"] = 5
    q.metadata["step"] = 7
    assert torch.equal(q.mean["w"], torch.ones(2))
    assert not q.mean["w"].requires_grad
    assert q.metadata == {"step": [1]}


def test_sampling_never_touches_the_global_stream() -> None:
    state = torch.get_rng_state()
    q = posterior()
    q.sample()
    q.sample(generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_generator_a_private_one_goes_on() -> None:
    q = posterior()
    first, second, again = q.sample(), q.sample(), posterior().sample()
    assert torch.equal(first["fc.weight"], again["fc.weight"])
    assert not torch.equal(first["fc.weight"], second["fc.weight"])
    assert torch.equal(copy.deepcopy(q).sample()["fc.weight"], q.sample()["fc.weight"])


def test_half_precision_is_widened_and_mixtures_keep_their_dtypes() -> None:
    mean = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.ones(2),
        "c": torch.ones(2, dtype=torch.float64),
    }
    q = DiagonalPosterior(mean, {name: torch.ones(2) for name in mean})
    assert [t.dtype for t in q.sample(generator()).values()] == [torch.float32, torch.float32, torch.float64]


def test_dense_covariance_stacks_the_columns_of_weight_and_bias() -> None:
    q = posterior()
    covariance = q.dense_covariance("fc")
    matrix = torch.cat([q.variance["fc.weight"], q.variance["fc.bias"][:, None]], 1)
    column_stacked = torch.stack([matrix[i, j] for j in range(5) for i in range(3)])
    assert torch.equal(covariance, column_stacked.diag())
    assert q.dense_covariance("fc.weight").shape == (12, 12)
    with pytest.raises(InvalidValue, match="nothing"):
        q.dense_covariance("nothing")


def test_moving_keeps_everything() -> None:
    q = posterior()
    moved = q.to("cpu")
    assert moved.metadata == q.metadata
    assert moved.deterministic == q.deterministic
    assert torch.equal(moved.sample(generator())["fc.bias"], q.sample(generator())["fc.bias"])


one = torch.ones(2)


@pytest.mark.parametrize(
    ("mean", "variance", "error", "word"),
    [
        ({}, {}, InvalidValue, "mean is empty"),
        ({"w": one}, {"w": torch.ones(3)}, InvalidValue, r"\(3,\) instead of \(2,\)"),
        ({"w": one}, {"v": one}, InvalidValue, "'v' is unexpected"),
        ({"w": one}, {"w": torch.tensor([1.0, 0.0])}, InvalidValue, "not positive"),
        ({"w": one}, {"w": torch.tensor([1.0, -1.0])}, InvalidValue, "not positive"),
        ({"w": one}, {"w": torch.tensor([1.0, math.nan])}, InvalidValue, "not positive"),
        ({"w": one}, {"w": torch.tensor([1.0, math.inf])}, InvalidValue, "not positive"),
        ({"w": torch.tensor([1.0, math.nan])}, {"w": one}, InvalidValue, "mean of 'w' is not finite"),
        ({"w": torch.ones(2, dtype=torch.int64)}, {}, InvalidType, "int64"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, {}, InvalidType, "complex64"),
        ({"w": 1.0}, {}, InvalidType, "float"),
        ({1: one}, {}, InvalidType, "strings as names"),
        ([one], {}, InvalidType, "must map names"),
    ],
)
def test_moments_that_make_no_sense_are_refused(
    mean: dict[str, Tensor], variance: dict[str, Tensor], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        DiagonalPosterior(mean, variance)


@pytest.mark.parametrize(
    ("prior", "error"), [(0.0, InvalidValue), (-1, InvalidValue), (math.nan, InvalidValue)]
)
def test_priors_that_make_no_sense_are_refused(prior: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="prior"):
        posterior().kl(prior)


@pytest.mark.parametrize("prior", [True, "1", None])
def test_priors_of_the_wrong_type_are_refused(prior: object) -> None:
    with pytest.raises(InvalidType, match="prior"):
        posterior().kl(prior)  # type: ignore[arg-type]


def test_different_weights_are_listed() -> None:
    q = posterior()
    other = DiagonalPosterior({"fc.weight": torch.ones(3, 4)}, {"fc.weight": torch.ones(3, 4)})
    with pytest.raises(InvalidValue, match=r"prior.*'fc.bias' is missing"):
        q.kl(other)
    with pytest.raises(InvalidValue, match=r"'fc.weight' is missing"):
        q.log_prob({"fc.bias": torch.ones(3)})


def test_metadata_must_be_json() -> None:
    for bad in ({"a": torch.ones(1)}, {"a": math.nan}):
        with pytest.raises(InvalidType, match="metadata"):
            DiagonalPosterior({"w": one}, {"w": one}, bad)


def test_a_generator_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidType, match="generator"):
        posterior().sample(0)  # type: ignore[arg-type]
