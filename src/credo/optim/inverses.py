"""Inverses of Kronecker factors with damping γ, as square roots: pure functions of A (…, J, J) and G (…, O, O).

    pi      (A + π√γ I)⁻¹ = CCᵀ,  (G + √γ/π I)⁻¹ = RRᵀ,  π² = mean eigenvalue of A over that of G   (the paper's)
    eigen   A = U diag(a) Uᵀ,  G = V diag(g) Vᵀ;  (A ⊗ G + γI)⁻¹ is 1/(g aᵀ + γ) in these bases      (exact)

The first adds √γ(πG ⊗ I + I ⊗ A/π)-like terms beside γ, so its variance is smaller; it needs Cholesky factors only.
"""

import torch
from torch import Tensor

from credo.errors import InvalidValue
from credo.posterior.matrix_normal import Root

FORMS = ("pi", "eigen")


def pi_roots(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """R and C."""
    rows, columns = pi_shifts(inputs, outputs, damping)
    return inverse_root(outputs, rows), inverse_root(inputs, columns)


def pi_shifts(inputs: Tensor, outputs: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """√γ/π, which is added to G, and π√γ, to A."""
    a, g = (_mean_eigenvalue(t) for t in (inputs, outputs))
    pi = torch.where((a > 0) & (g > 0), a / g, 1.0).sqrt()
    root = torch.as_tensor(damping, dtype=pi.dtype, device=pi.device).sqrt()
    return root / pi, root * pi


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors, and eigenvalues that rounding has not made negative."""
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # single precision fails on many equal values
        values, vectors = (t.to(factor.dtype) for t in torch.linalg.eigh(factor.double()))
    return vectors.contiguous(), values.clamp_min(0)


def eigen_scale(outputs: Tensor, inputs: Tensor, damping: float | Tensor) -> Tensor:
    """S = 1/√(g aᵀ + γ) from eigenvalues g (…, O) and a (…, J)."""
    return (outputs.unsqueeze(-1) * inputs.unsqueeze(-2) + damping).rsqrt()


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def inverse_root(factor: Tensor, shift: Tensor) -> Tensor:
    """L with LLᵀ = (factor + shift·I)⁻¹: the transposed inverse of the Cholesky factor."""
    matrix = factor.clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        return _inverse_root_by_eigenvalues(matrix, shift)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse.mT.contiguous()


def _inverse_root_by_eigenvalues(matrix: Tensor, shift: Tensor) -> Tensor:
    """Where rounding has eaten the shift: no eigenvalue is smaller than it."""
    if not bool((shift > 0).all()):
        raise InvalidValue(
            "a Kronecker factor is singular, and there is neither a prior nor damping: an improper posterior. Give "
            "prior_precision or damping > 0."
        )
    values, vectors = torch.linalg.eigh(matrix.double())
    floor = shift.double().unsqueeze(-1)
    root: Tensor = vectors * values.clamp_min(floor).rsqrt().unsqueeze(-2)
    return root.to(matrix.dtype).contiguous()


class Inverses:
    """H⁻¹ times a matrix; keeps the products RRᵀ and CCᵀ between refreshes. Copies start without them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __reduce__(self) -> tuple[type["Inverses"], tuple[()]]:
        return Inverses, ()

    def times(self, weight: Tensor, root: Root, matrix: Tensor) -> Tensor:
        if root.scale.dim():
            return root.covariance_times(matrix)
        kept = self._kept.get(id(weight))
        if kept is None or kept[0] is not root.rows:
            kept = root.rows, root.rows @ root.rows.mT, root.columns @ root.columns.mT
            self._kept[id(weight)] = kept
        return kept[1] @ matrix @ kept[2]
