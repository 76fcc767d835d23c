"""Damped inverses of Kronecker factors against dense ones, where rounding hurts too."""

import pytest
import torch

from credo.errors import InvalidValue
from credo.optim.kronecker import Inverses, eigen_scale, eigenbasis, pi_roots
from credo.posterior.matrix_normal import Root


def factor(size: int, rank: int, seed: int) -> torch.Tensor:
    rows = torch.randn(rank, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows / rank


@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("damping", [1e-6, 0.3])
def test_roots_and_products_of_the_damped_inverse(rank, damping):
    a, g = factor(5, rank, 0), factor(3, rank, 1)
    pi = (a.trace() / 5 / (g.trace() / 3)).sqrt()
    damped = a + pi * damping**0.5 * torch.eye(5).double(), g + damping**0.5 / pi * torch.eye(3).double()
    rows, columns = pi_roots(a, g, damping)
    torch.testing.assert_close(rows @ rows.T, torch.linalg.inv(damped[1]), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(columns @ columns.T, torch.linalg.inv(damped[0]), rtol=1e-7, atol=1e-9)
    (v, values), (u, others) = eigenbasis(g), eigenbasis(a)
    exact = torch.linalg.inv(torch.kron(a, g) + damping * torch.eye(15).double())
    root = Root(v, u, eigen_scale(values, others, damping))
    torch.testing.assert_close(root.dense(), exact, rtol=1e-6, atol=1e-7)
    m = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for form, covariance in ((root, exact), (Root(rows, columns, rows.new_ones(())), None)):
        covariance = form.dense() if covariance is None else covariance
        expected = (covariance @ m.T.reshape(-1)).view(5, 3).T
        torch.testing.assert_close(Inverses().times(m, form, m), expected, rtol=1e-6, atol=1e-6)


def test_stacks_of_factors_are_one_by_one():
    inputs = torch.stack([factor(4, 9, k) for k in range(3)])
    outputs = torch.stack([factor(2, 9, k + 5) for k in range(3)]) * torch.tensor([1.0, 10.0, 0.1]).view(
        3, 1, 1
    )
    together = pi_roots(inputs, outputs, 0.1)
    for k in range(3):
        torch.testing.assert_close([part[k] for part in together], list(pi_roots(inputs[k], outputs[k], 0.1)))


def test_factors_that_are_zero_or_huge_in_float32():
    zero, huge = torch.zeros(3, 3), factor(4, 1, 0).float() * 1e25
    for a, g in ((huge, zero), (zero, huge), (huge, huge)):
        rows, columns = pi_roots(a, g, 1e-3)
        assert bool(rows.isfinite().all())
        assert bool(columns.isfinite().all())
        assert float(torch.linalg.det(rows.double()).abs()) > 0


def test_neither_prior_nor_damping():
    with pytest.raises(InvalidValue, match="improper"):
        pi_roots(factor(4, 1, 0), factor(3, 1, 1), 0.0)


def test_eigenbases_where_single_precision_fails(monkeypatch):
    """Images of one pixel under padding: a few rows, most of them zero. LAPACK's ssyevd gives up on some of these."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 144, generator=generator)
    rows[:, torch.rand(144, generator=generator) < 0.88] = 0
    matrix, eigh = rows.relu().T @ rows.relu() / 4, torch.linalg.eigh
    vectors, values = eigenbasis(matrix)
    torch.testing.assert_close(vectors * values @ vectors.T, matrix, rtol=1e-5, atol=1e-5)

    def double_only(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", double_only)
    vectors, values = eigenbasis(matrix)
    assert vectors.dtype is values.dtype is torch.float32
    torch.testing.assert_close(vectors * values @ vectors.T, matrix, rtol=1e-5, atol=1e-5)
