"""Laplace against dense matrices: Jacobians by torch.func, inverses by torch.linalg, in float64."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import credo
from credo.errors import CredoError
from credo.posterior import DiagonalPosterior, KroneckerPosterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(build: type[nn.Module] | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return (build or Network)().double()


class Network(nn.Module):
    """A convolution, a norm, a weight that is used twice, and a linear end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)
        self.twice, self.end = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.end(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


X = torch.randn(12, 1, 3, 3, generator=generator(1), dtype=torch.float64)
Y = torch.arange(12) % 3
LOADER = [(X[:5], Y[:5]), (X[5:], Y[5:])]
UNCERTAIN = ("conv.weight", "conv.bias", "twice.weight", "twice.bias", "end.weight", "end.bias")


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """∂f/∂w of each example and output: (M, K, *shape)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)


def hessians(model: nn.Module, x: Tensor) -> Tensor:
    """Λ of each example."""
    p = model(x).softmax(1).detach()
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def test_the_diagonal_is_that_of_the_gauss_newton_matrix() -> None:
    model = seeded().eval()
    jac, inner = jacobians(model, X), hessians(model, X)
    q = credo.laplace(model, LOADER, "diagonal", 0.7)
    assert isinstance(q, DiagonalPosterior)
    assert q.deterministic == {"norm.weight", "norm.bias"}
    for name in UNCERTAIN:
        columns = jac[name].flatten(2)  # (M, K, P)
        diagonal = torch.einsum("mkp,mkl,mlp->p", columns, inner, columns)
        torch.testing.assert_close(1 / q.variance[name].flatten(), diagonal + 0.7, rtol=1e-10, atol=0)


def test_the_labels_of_the_data_give_the_empirical_fisher() -> None:
    model = seeded().eval()
    jac = jacobians(model, X)
    residual = model(X).softmax(1).detach() - F.one_hot(Y, 3)
    q = credo.laplace(model, LOADER, "diagonal", 0.7, labels="data")
    for name in UNCERTAIN:
        squares = torch.einsum("mkp,mk->mp", jac[name].flatten(2), residual).square().sum(0)
        torch.testing.assert_close(1 / q.variance[name].flatten(), squares + 0.7, rtol=1e-10, atol=0)


def linear_moments(layer: nn.Linear, inputs: Tensor, jac: Tensor, inner: Tensor) -> Tensor:
    """A ⊗ G / N for vec([W b]), column-stacked, from the definition; `jac` is ∂f/∂b, (M, K, O)."""
    a = torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1)
    outer = torch.einsum("mko,mkl,mlp->op", jac, inner, jac)
    return torch.kron(a.T @ a, outer) / len(inputs)


def test_kronecker_layers_have_the_inverse_of_the_dense_product() -> None:
    model = seeded().eval()
    jac, inner = jacobians(model, X), hessians(model, X)
    q = credo.laplace(model, LOADER, "kronecker", 0.7)
    assert isinstance(q, KroneckerPosterior)
    assert set(q.layers) == {"conv", "end"}  # a weight that is used twice keeps its exact diagonal
    seen: list[Tensor] = []
    hook = model.end.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))  # type: ignore[union-attr,operator]
    model(X)
    hook.remove()
    dense = linear_moments(model.end, seen[0], jac["end.bias"], inner)  # type: ignore[arg-type]
    eye = torch.eye(len(dense)).double()
    torch.testing.assert_close(
        q.dense_covariance("end"), torch.linalg.inv(dense + 0.7 * eye), rtol=1e-8, atol=1e-12
    )
    columns = jac["twice.weight"].flatten(2)
    diagonal = torch.einsum("mkp,mkl,mlp->p", columns, inner, columns)
    torch.testing.assert_close(1 / q.variance["twice.weight"].flatten(), diagonal + 0.7, rtol=1e-10, atol=0)


def test_the_last_layer_alone_is_the_same_as_within_the_whole() -> None:
    model = seeded()
    whole = credo.laplace(model, LOADER, "kronecker", 0.7)
    last = credo.laplace(model, LOADER, "last_layer", 0.7)
    torch.testing.assert_close(
        last.dense_covariance("end"), whole.dense_covariance("end"), rtol=1e-8, atol=1e-12
    )
    assert last.deterministic == set(last.mean) - {"end.weight", "end.bias"}


def linear_problem(outputs: int = 2) -> tuple[nn.Linear, Tensor, Tensor]:
    x = torch.randn(30, 3, generator=generator(2), dtype=torch.float64)
    w = torch.randn(outputs, 4, generator=generator(3), dtype=torch.float64)
    a = torch.cat([x, torch.ones(30, 1).double()], 1)
    y = a @ w.T + 0.3 * torch.randn(30, outputs, generator=generator(4), dtype=torch.float64)
    return nn.Linear(3, outputs).double(), x, y


def at_the_mode(model: nn.Linear, x: Tensor, y: Tensor, precision: float, noise: float) -> None:
    a = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    solution = torch.linalg.solve(a.T @ a + noise * precision * torch.eye(a.shape[1]).double(), a.T @ y).T
    with torch.no_grad():
        model.weight.copy_(solution[:, :-1])
        model.bias.copy_(solution[:, -1])


@pytest.mark.parametrize("structure", ["kronecker", "last_layer"])
def test_bayesian_linear_regression_is_exact(structure: str) -> None:
    """Covariance and marginal likelihood are known in closed form, and Λ is constant, so that A ⊗ G is H itself."""
    (model, x, y), precision, noise = linear_problem(), 1.7, 0.09
    at_the_mode(model, x, y, precision, noise)
    q = credo.laplace(model, [(x, y)], structure, precision, task="regression", noise=noise)  # type: ignore[arg-type]
    a = torch.cat([x, torch.ones(30, 1).double()], 1)
    one = torch.linalg.inv(a.T @ a / noise + precision * torch.eye(4).double()).contiguous()
    name = next(iter(q.layers))  # type: ignore[attr-defined]
    torch.testing.assert_close(
        q.dense_covariance(name), torch.kron(one, torch.eye(2).double()), rtol=1e-9, atol=1e-12
    )
    marginal = MultivariateNormal(
        torch.zeros(30).double(), noise * torch.eye(30).double() + a @ a.T / precision
    )
    truth = sum(marginal.log_prob(y[:, k]).item() for k in range(2))
    assert q.metadata["log_marginal_likelihood"] == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "last_layer"])
def test_the_marginal_likelihood_is_largest_at_the_precision_that_is_chosen(structure: str) -> None:
    model = seeded()
    chosen = credo.laplace(model, LOADER, structure, "marglik").metadata  # type: ignore[arg-type]
    best, precision = chosen["log_marginal_likelihood"], chosen["prior_precision"]
    assert isinstance(precision, float)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = credo.laplace(model, LOADER, structure, precision * factor).metadata  # type: ignore[arg-type]
        assert other["log_marginal_likelihood"] < best  # type: ignore[operator]


def test_the_marginal_likelihood_is_the_dense_formula() -> None:
    model = seeded().eval()
    q = credo.laplace(model, LOADER, "diagonal", 0.7)
    weights = torch.cat([q.mean[name].flatten() for name in UNCERTAIN])
    precisions = torch.cat([1 / q.variance[name].flatten() for name in UNCERTAIN])
    fit = -F.cross_entropy(model(X), Y, reduction="sum").item()
    prior = -0.5 * 0.7 * weights.square().sum() + 0.5 * len(weights) * math.log(0.7)
    truth = fit + prior.item() - 0.5 * precisions.log().sum().item()
    assert q.metadata["log_marginal_likelihood"] == pytest.approx(truth, rel=1e-10)


def test_validation_takes_the_precision_with_the_smallest_nll() -> None:
    model = seeded()
    x, y = torch.randn(20, 1, 3, 3, generator=generator(5), dtype=torch.float64), torch.arange(20) % 3
    q = credo.laplace(model, LOADER, "kronecker", validation=[(x, y)], samples=5, seed=3)
    precision = q.metadata["prior_precision"]

    def nll(value: float) -> float:
        other = credo.laplace(model, LOADER, "kronecker", value)
        return credo.metrics.nll(credo.predict(model, other, x, samples=5, seed=3).probs, y)

    assert isinstance(precision, float)
    best = nll(precision)
    for factor in (10**-0.25, 10**0.25, 1e-2, 1e2):
        assert nll(precision * factor) >= best


def test_regression_chooses_by_validation_too() -> None:
    model, x, y = linear_problem()
    at_the_mode(model, x, y, 1.0, 0.09)
    q = credo.laplace(
        model, [(x, y)], "diagonal", task="regression", noise=0.09, validation=[(x[:10], y[:10])], samples=5
    )
    assert isinstance(q.metadata["prior_precision"], float)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "last_layer"])
def test_the_model_is_left_as_it_was_and_the_posterior_can_be_saved(structure: str, tmp_path: Path) -> None:
    model = seeded().train()
    F.cross_entropy(model(X), Y).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    q = credo.laplace(model, LOADER, structure, 1.0)  # type: ignore[arg-type]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True) if g is not None
    )  # type: ignore[arg-type]
    assert model.training
    assert model.norm.training  # type: ignore[union-attr]
    assert torch.equal(state, torch.get_rng_state())
    q.save(tmp_path / "q")
    loaded = credo.load_posterior(tmp_path / "q")
    both = [credo.predict(model, p, X, samples=3).probs for p in (q, loaded)]
    assert torch.equal(*both)


def test_float32_agrees_with_float64() -> None:
    wide, narrow = seeded(), seeded().float()
    pairs = [(x.float(), y) for x, y in LOADER]
    for structure in ("diagonal", "kronecker"):
        one = credo.laplace(wide, LOADER, structure, 0.7).variance  # type: ignore[arg-type]
        other = credo.laplace(narrow, pairs, structure, 0.7).variance  # type: ignore[arg-type]
        assert all(other[name].dtype == torch.float32 for name in UNCERTAIN)
        for name in UNCERTAIN:
            torch.testing.assert_close(other[name].double(), one[name], rtol=2e-4, atol=1e-6)


BAD = {
    "structure": ({"structure": "full"}, "structure must be one of"),
    "prior word": ({"prior_precision": "best"}, "'marglik' or 'validation', got 'best'"),
    "prior": ({"prior_precision": -1.0}, "prior_precision must be finite and > 0"),
    "no validation": ({"prior_precision": "validation"}, "needs validation="),
    "labels": ({"labels": "both"}, "labels must be"),
    "task": ({"task": "ranking"}, "task must be"),
    "noise": ({"task": "regression", "noise": 0.0}, "noise must be finite and > 0"),
    "layer": ({"structure": "last_layer", "layer": "fc"}, "'fc' is no module of the model; there are conv"),
    "inner layer": ({"structure": "last_layer", "layer": "conv"}, "does not give the model's output"),
    "empty": ({"loader": []}, "no examples"),
    "no pairs": ({"loader": [X]}, "pairs \\(x, y\\)"),
    "unequal": ({"loader": [(X, Y[:3])]}, "12 inputs and 3 targets"),
    "model": ({"model": "lenet"}, "model must be a torch.nn.Module"),
}


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_named(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(CredoError, match=message):
        credo.laplace(**{"model": seeded(), "loader": LOADER, **change})  # type: ignore[arg-type]
