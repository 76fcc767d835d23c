"""SWAG against the paper's formulas over a list of all weights, in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import CallOrderError, CredoError
from credo.posterior import DiagonalPosterior, LowRankPosterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(40, 4, generator=generator(1), dtype=torch.float64)
Y = (X[:, 0] * X[:, 1] > 0).long()


def network(norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        middle: list[nn.Module] = [nn.BatchNorm1d(6)] if norm else []
        return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def walk(model: nn.Module, steps: int, collect: Callable[[nn.Module], None]) -> list[Tensor]:
    """Plain SGD; the weights at each collection, flat."""
    optimizer, path = torch.optim.SGD(model.parameters(), lr=0.3), []
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X[step % 4 :: 4]), Y[step % 4 :: 4]).backward()
        optimizer.step()
        collect(model)
        path.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return path


def by_hand(path: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance as in the paper's Algorithm 1, the running means computed from scratch each time."""
    mean = torch.stack(path).mean(0)
    diagonal = torch.stack([w**2 for w in path]).mean(0) - mean**2
    deviations = [path[i] - torch.stack(path[: i + 1]).mean(0) for i in range(len(path))][-rank:]
    columns = torch.stack(deviations, 1)
    return mean, diagonal.diag() / 2 + columns @ columns.T / (2 * (len(deviations) - 1))


@pytest.mark.parametrize(("steps", "rank"), [(2, 5), (5, 5), (12, 5)])
def test_mean_and_covariance_are_those_of_the_paper(steps: int, rank: int) -> None:
    model = network()
    swag = credo.SWAG(model, rank=rank)
    mean, covariance = by_hand(walk(model, steps, swag.collect), rank)
    q = swag.posterior()
    assert isinstance(q, LowRankPosterior)
    flat = torch.cat([tensor.flatten() for tensor in q.mean.values()])
    torch.testing.assert_close(flat, mean, rtol=1e-12, atol=1e-14)
    factors = torch.cat([tensor.flatten(1) for tensor in q.factors.values()], 1)
    diagonal = torch.cat([tensor.flatten() for tensor in q.diagonal.values()])
    torch.testing.assert_close(diagonal.diag() + factors.T @ factors, covariance, rtol=1e-9, atol=1e-13)
    assert q.rank == min(rank, steps)


def test_rank_0_is_diagonal_with_the_whole_variance() -> None:
    model = network()
    swag = credo.SWAG(model, rank=0)
    path = torch.stack(walk(model, 6, swag.collect))
    q = swag.posterior()
    assert isinstance(q, DiagonalPosterior)
    variance = torch.cat([tensor.flatten() for tensor in q.variance.values()])
    torch.testing.assert_close(variance, path.var(0, correction=0), rtol=1e-8, atol=1e-14)


def test_predict_takes_it_as_its_posterior(tmp_path: Path) -> None:
    model = network()
    swag = credo.SWAG(model, rank=3)
    walk(model, 6, swag.collect)
    found = credo.predict(model, swag, X, samples=8, seed=2).probs
    assert torch.equal(found, credo.predict(model, swag.posterior(), X, samples=8, seed=2).probs)
    swag.save(tmp_path / "q")
    loaded = credo.load_posterior(tmp_path / "q")
    assert torch.equal(found, credo.predict(model, loaded, X, samples=8, seed=2).probs)
    draws = swag.posterior().sample_many(generator(2), 8)
    by_draw = [
        torch.func.functional_call(model, {name: t[k] for name, t in draws.items()}, (X,)).softmax(1)
        for k in range(8)
    ]
    torch.testing.assert_close(found, torch.stack(by_draw).mean(0), rtol=1e-6, atol=1e-9)


def test_a_resumed_collection_is_bitwise_the_same() -> None:
    whole, model = credo.SWAG(network(), rank=3), network()
    walk(model, 9, whole.collect)
    model, first = network(), credo.SWAG(network(), rank=3)
    second = credo.SWAG(network(), rank=3)
    seen = 0

    def collect(model: nn.Module) -> None:
        nonlocal seen
        (first if seen < 4 else second).collect(model)
        seen += 1
        if seen == 4:
            second.load_state_dict(first.state_dict())

    walk(model, 9, collect)
    mine, theirs = (swag.posterior().tensors() for swag in (whole, second))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_normalisation_is_averaged_and_certain_and_its_statistics_belong_to_the_mean() -> None:
    model = network(norm=True)
    swag = credo.SWAG(model, rank=3)
    walk(model, 8, swag.collect)
    q = swag.posterior()
    assert q.deterministic == {"1.weight", "1.bias"}
    other = network(norm=True).train()
    swag.load_mean(other, [(X, Y)])
    norm = other[1]  # type: ignore[index]
    hidden = F.linear(X, q.mean["0.weight"], q.mean["0.bias"])
    torch.testing.assert_close(norm.running_mean, hidden.mean(0))
    torch.testing.assert_close(norm.running_var, hidden.var(0))
    assert other.training
    assert norm.momentum == 0.1
    assert torch.equal(other[0].weight.detach(), q.mean["0.weight"])  # type: ignore[index]


def test_statistics_are_averaged_over_batches_and_put_back_after_an_error() -> None:
    model = network(norm=True)
    assert credo.refresh_batch_norm(model, [X[:20], X[20:]]) == 1
    hidden = model[0](X).detach()  # type: ignore[index]
    expected = (hidden[:20].mean(0) + hidden[20:].mean(0)) / 2
    torch.testing.assert_close(model[1].running_mean, expected)  # type: ignore[index]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for bad in ([], [X, X[:, :3]]):
        with pytest.raises((CredoError, RuntimeError)):
            credo.refresh_batch_norm(model, bad)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert model.training
    assert credo.refresh_batch_norm(network(), iter([])) == 0


def test_float32_keeps_a_spread_that_is_small_beside_the_mean() -> None:
    model = network(dtype=torch.float32)
    swag, base = credo.SWAG(model, rank=2), nn.utils.parameters_to_vector(model.parameters()).detach() + 100
    for k in range(4):
        nn.utils.vector_to_parameters(base + 1e-3 * (-1) ** k, model.parameters())
        swag.collect(model)
    spread = torch.cat([t.flatten() for t in swag.posterior().diagonal.values()])  # type: ignore[attr-defined]
    torch.testing.assert_close(spread, torch.full_like(spread, 0.5e-6), rtol=2e-2, atol=0)
    assert spread.dtype == torch.float32


def test_misuse_is_named_and_changes_nothing() -> None:
    model = network()
    swag = credo.SWAG(model, rank=3)
    for collected in range(2):
        with pytest.raises(CallOrderError, match=f"collected {collected} times"):
            swag.posterior()
        swag.collect(model)
    before = swag.state_dict()
    broken = network()
    with torch.no_grad():
        broken[2].bias[0] = torch.inf  # type: ignore[index]
    for bad, message in [(broken, "not finite"), (nn.Linear(4, 2), "not the one SWAG was made for")]:
        with pytest.raises(CredoError, match=message):
            swag.collect(bad)
    assert str(swag.state_dict()) == str(before)
    for rank in (1, -1, 2.0, True):
        with pytest.raises(CredoError, match="rank"):
            credo.SWAG(model, rank=rank)  # type: ignore[arg-type]
    with pytest.raises(CredoError, match="rank=3, and here it is 4"):
        credo.SWAG(model, rank=4).load_state_dict(before)
