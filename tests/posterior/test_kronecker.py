"""The Kronecker posterior against dense Gaussians of the same covariance."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import credo
from credo.errors import InvalidValue, UnsupportedOperation
from credo.posterior import DiagonalPosterior, KroneckerPosterior, Layer, Root

SHAPES = {
    "conv.bias": (4,),
    "conv.weight": (4, 2, 2),  # two groups
    "norm.weight": (3,),
    "fc.weight": (3, 4),
    "table": (5,),
    "fc.bias": (3,),
    "bare": (2, 3),
}
LAYERS = {"conv": ("conv.weight", "conv.bias"), "fc": ("fc.weight", "fc.bias"), "bare": ("bare", None)}
STACKS = {"conv": (2, 2, 5), "fc": (3, 5), "bare": (2, 3)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior(seed: int = 0, form: str = "pi", dtype: torch.dtype = torch.float64) -> KroneckerPosterior:
    g = generator(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    def root(shape: tuple[int, ...]) -> Root:
        *lead, rows, columns = shape
        scale = rand().exp() if form == "pi" else rand(*shape).exp()
        sides = (rand(*lead, n, n) / 2 + 1.5 * torch.eye(n, dtype=dtype) for n in (rows, columns))
        return Root(*sides, scale)

    mean = {name: rand(*shape) for name, shape in SHAPES.items()}
    layers = {name: Layer(*pair, root(STACKS[name])) for name, pair in LAYERS.items()}
    return KroneckerPosterior(mean, layers, {"table": rand(5).exp()}, {"method": "KFAC"})


def dense(q: KroneckerPosterior | DiagonalPosterior) -> MultivariateNormal:
    """The same Gaussian with its whole covariance, over the blocks one after the other."""
    blocks = [q.dense_covariance(name) for name in (*LAYERS, "table")]
    return MultivariateNormal(flat(q.mean), torch.block_diag(*blocks))


def vec(weights: dict[str, Tensor], pair: tuple[str, str | None]) -> Tensor:
    """vec([W b]), column-stacked; of one draw, or of each of many."""
    weight, bias = pair
    extra = weights[weight].dim() - len(SHAPES[weight])
    columns = weights[weight].flatten(1 + extra)
    if bias is not None:
        columns = torch.cat([columns, weights[bias].unsqueeze(-1)], -1)
    return columns.transpose(-1, -2).flatten(extra)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([*(vec(weights, pair) for pair in LAYERS.values()), weights["table"]], -1)


FORMS = pytest.mark.parametrize("form", ["pi", "eigen"])


@FORMS
def test_kl_entropy_and_log_prob_are_those_of_the_dense_gaussian(form):
    q, p = posterior(0, form), posterior(1, "pi")
    torch.testing.assert_close(q.entropy(), dense(q).entropy(), rtol=1e-10, atol=1e-9)
    weights = p.sample(generator(3))
    torch.testing.assert_close(q.log_prob(weights), dense(q).log_prob(flat(weights)), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(q.kl(p), kl_divergence(dense(q), dense(p)), rtol=1e-9, atol=1e-8)
    assert float(q.kl(q).abs()) < 1e-9
    diagonal = DiagonalPosterior(p.mean, {n: v for n, v in p.variance.items() if n != "norm.weight"})
    spread = torch.cat([*(vec(p.variance, pair) for pair in LAYERS.values()), p.variance["table"]])
    mean_field = MultivariateNormal(flat(p.mean), spread.diag())
    torch.testing.assert_close(q.kl(diagonal), kl_divergence(dense(q), mean_field), rtol=1e-9, atol=1e-8)
    zero = torch.zeros_like(flat(q.mean))
    isotropic = MultivariateNormal(zero, torch.eye(len(zero)).double() / 3)
    torch.testing.assert_close(q.kl(3.0), kl_divergence(dense(q), isotropic), rtol=1e-9, atol=1e-8)


@FORMS
def test_the_variance_is_the_diagonal_of_the_dense_covariance(form):
    q = posterior(form=form)
    for name, pair in LAYERS.items():
        torch.testing.assert_close(vec(q.variance, pair), q.dense_covariance(name).diagonal())
    assert torch.equal(q.variance["norm.weight"], torch.zeros(3).double())
    assert q.deterministic == {"norm.weight"}
    assert list(q.variance) == list(q.mean) == list(SHAPES)


def test_one_parameter_of_a_layer_has_its_part_of_the_covariance():
    q = posterior()
    whole = q.dense_covariance("fc")
    torch.testing.assert_close(q.dense_covariance("fc.weight"), whole[:12, :12])
    torch.testing.assert_close(q.dense_covariance("fc.bias"), whole[12:, 12:])
    torch.testing.assert_close(q.dense_covariance("bare").diagonal(), q.variance["bare"].T.reshape(-1))
    torch.testing.assert_close(q.dense_covariance("table"), q.variance["table"].diag())
    with pytest.raises(InvalidValue, match="'elsewhere'"):
        q.dense_covariance("elsewhere")


def test_groups_are_independent_of_each_other():
    covariance = posterior().dense_covariance("conv").view(5, 2, 2, 5, 2, 2)
    assert float(covariance[:, 0, :, :, 1].abs().max()) == 0.0
    assert float(covariance[:, 0, :, :, 0].abs().min()) > 0.0


@FORMS
def test_samples_have_the_dense_covariance(form):
    q, n = posterior(form=form), 20_000
    draws = flat(q.sample_many(generator(5), n))
    truth = dense(q)
    away = draws - truth.mean
    z_means = away.mean(0) / (truth.variance / n).sqrt()
    c = truth.covariance_matrix
    spread = ((torch.outer(c.diagonal(), c.diagonal()) + c.square()) / n).sqrt()
    assert float(z_means.abs().max()) < 5
    assert float(((away.T @ away / n - c) / spread).abs().max()) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_how_many_are_taken_at_a_time(dtype):
    q = posterior(dtype=dtype)
    together, split = q.sample_many(generator(2), 6), generator(2)
    apart = [q.sample_many(split, n) for n in (1, 2, 3)]
    assert all(torch.equal(together[n], torch.cat([part[n] for part in apart])) for n in SHAPES)
    assert all(tensor.dtype == dtype for tensor in together.values())


@FORMS
def test_files_keep_everything(form, tmp_path):
    q = posterior(form=form, dtype=torch.float32)
    q.save(tmp_path / "q.safetensors")
    loaded = credo.load_posterior(tmp_path / "q.safetensors")
    assert isinstance(loaded, KroneckerPosterior)
    assert (
        loaded.metadata == q.metadata == {"method": "KFAC", "layers": {k: list(v) for k, v in LAYERS.items()}}
    )
    here, there = q.sample_many(generator(), 2), loaded.sample_many(generator(), 2)
    assert list(here) == list(there)
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert float(q.kl(loaded).abs()) < 1e-5
    assert q.to("cpu").sample(generator())["bare"].equal(q.sample(generator())["bare"])


def test_what_cannot_be_meant():
    q = posterior()
    mean, layers = q.mean, q.layers
    with pytest.raises(InvalidValue, match=r"'fc'.*'fc\.bias' that mean lacks"):
        KroneckerPosterior({n: m for n, m in mean.items() if n != "fc.bias"}, layers, {})
    with pytest.raises(InvalidValue, match="one of them"):
        KroneckerPosterior(mean, layers, {"bare": torch.ones(2, 3)})
    wrong = Layer("fc.weight", None, layers["fc"].root)
    with pytest.raises(InvalidValue, match="'fc' has 12 weights"):
        KroneckerPosterior(mean, {"fc": wrong}, {})
    bad = Root(layers["fc"].root.rows * math.nan, layers["fc"].root.columns, layers["fc"].root.scale)
    with pytest.raises(InvalidValue, match="finite factors"):
        KroneckerPosterior(mean, {"fc": Layer("fc.weight", "fc.bias", bad)}, {})
    with pytest.raises(InvalidValue, match="different weights"):
        q.log_prob({"fc.weight": mean["fc.weight"]})
    with pytest.raises(UnsupportedOperation, match="DiagonalPosterior"):
        DiagonalPosterior(mean, q.variance).kl(q)
    fewer = {n: layers[n] for n in ("conv", "fc")}
    other = KroneckerPosterior(mean, fewer, {"table": torch.ones(5), "bare": torch.ones(2, 3)})
    with pytest.raises(UnsupportedOperation, match="other layers"):
        q.kl(other)
