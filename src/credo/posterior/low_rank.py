"""A Gaussian with a diagonal and a low-rank part, over all weights together: what SWAG leaves.

    w = μ + σ·ε + F z,   Cov = diag σ² + FFᵀ,   F (P, K),   ε and z standard normal

Determinants and inverses are of size K: |Cov| = |diag σ²| |I + Fᵀ diag(σ⁻²) F|, and likewise (Woodbury).
"""

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from credo.errors import InvalidValue, UnsupportedOperation
from credo.posterior.base import Posterior, Prior, Weights, check_generator, standard_normal
from credo.posterior.diagonal import LOG_2PI, DiagonalPosterior, sum_terms
from credo.posterior.files import register_kind
from credo.validate import json_copy, mismatches, named_tensors, positive


@final
@register_kind
class LowRankPosterior(Posterior):
    """`diagonal` σ² and `factors` F, each (K, *shape), by parameter name, for the same names; others are deterministic.

    The order of the names in `mean` is the order in which draws use the random stream.
    """

    kind: ClassVar[str] = "low_rank"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        diagonal: Mapping[str, Tensor],
        factors: Mapping[str, Tensor],
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        base = DiagonalPosterior(mean, diagonal)  # checks the moments
        self._mean = base.mean
        self._diagonal = {n: v for n, v in base.variance.items() if n not in base.deterministic}
        self._factors = named_tensors("factors", factors)
        self._metadata = json_copy("metadata", metadata or {})
        self._check_factors()

    @property
    def mean(self) -> Weights:
        return dict(self._mean)

    @property
    def variance(self) -> Weights:
        """The diagonal of the covariance, σ² + Σₖ Fₖ²."""
        return {
            name: self._diagonal[name] + self._factors[name].square().sum(0)
            if name in self._diagonal
            else mean.new_zeros(()).expand(mean.shape)
            for name, mean in self._mean.items()
        }

    @property
    def diagonal(self) -> Weights:
        """σ², the part that is each weight's own; for names that are not deterministic."""
        return dict(self._diagonal)

    @property
    def factors(self) -> Weights:
        """F by name, (K, *shape)."""
        return dict(self._factors)

    @property
    def rank(self) -> int:
        """K."""
        return len(next(iter(self._factors.values()))) if self._factors else 0

    @property
    def deterministic(self) -> frozenset[str]:
        return frozenset(self._mean.keys() - self._diagonal.keys())

    @property
    def metadata(self) -> dict[str, object]:
        return json_copy("metadata", self._metadata)

    def sample_many(self, generator: torch.Generator | None, n: int) -> Weights:
        """One row of z and ε for each draw; names in the order of `mean`."""
        generator = check_generator(self._own_generator() if generator is None else generator, self.device)
        wide = any(mean.dtype == torch.float64 for mean in self._mean.values())
        dtype, rank = torch.float64 if wide else torch.float32, self.rank
        width = rank + sum(tensor.numel() for tensor in self._diagonal.values())
        draws = [self._draw(row, rank) for row in standard_normal(generator, n, width, dtype, self.device)]
        return {
            name: torch.stack([draw[name] for draw in draws]) if draws else mean.new_empty((0, *mean.shape))
            for name, mean in self._mean.items()
        }

    def _draw(self, noise: Tensor, rank: int) -> Weights:
        common, noise = noise[:rank], noise[rank:]
        found = dict(self._mean)
        for name, mean in self._mean.items():
            if name not in self._diagonal:
                continue
            own, noise = noise[: mean.numel()].view(mean.shape), noise[mean.numel() :]
            shared = (common.to(mean.dtype) @ self._factors[name].flatten(1)).view(mean.shape)
            found[name] = mean + own.to(mean.dtype) * self._diagonal[name].sqrt() + shared
        return found

    def kl(self, prior: Prior) -> Tensor:
        """½(tr(Σ₀⁻¹Σ) + (μ−μ₀)ᵀΣ₀⁻¹(μ−μ₀) − P + log|Σ₀| − log|Σ|), to a precision δ or a diagonal posterior."""
        if isinstance(prior, Posterior):
            if not isinstance(prior, DiagonalPosterior):
                raise UnsupportedOperation(
                    f"the KL from a low-rank posterior to a {type(prior).__name__} is not known here;"
                    " use DiagonalPosterior(prior.mean, prior.variance)"
                )
            certain = prior.deterministic
            self._check_same_weights("prior", {n: m for n, m in prior.mean.items() if n not in certain})
            there = prior.to(self.device)
            means, variances = there.mean, there.variance
        else:
            wide = torch.tensor(1 / positive("prior", prior), dtype=torch.float64, device=self.device)
            means = {name: torch.zeros_like(wide) for name in self._diagonal}
            variances = dict.fromkeys(self._diagonal, wide)
        own, terms = self.variance, []
        for name in self._diagonal:
            mean, variance = means[name].double(), variances[name].double().expand(self._mean[name].shape)
            away = (self._mean[name].double() - mean).square()
            terms.append((own[name].double() + away) / variance + variance.log() - 1)
        return 0.5 * (sum_terms(terms, self.device) - self._log_det())

    def entropy(self) -> Tensor:
        size = sum(tensor.numel() for tensor in self._diagonal.values())
        return 0.5 * (size * (1 + LOG_2PI) + self._log_det())

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        given = {n: w.to(self.device) for n, w in weights.items() if n not in self.deterministic}
        self._check_same_weights("weights", given)
        away = torch.cat([(given[n].double() - self._mean[n].double()).flatten() for n in self._diagonal])
        diagonal, factors = self._flat()
        scaled = away / diagonal
        inner = factors @ scaled  # Fᵀ diag(σ⁻²) (w − μ)
        square = away @ scaled - inner @ torch.linalg.solve(self._capacitance(diagonal, factors), inner)
        found: Tensor = -0.5 * (len(away) * LOG_2PI + self._log_det() + square)
        return found

    def to(self, device: torch.device | str) -> "LowRankPosterior":
        mean, diagonal, factors = (
            {name: tensor.to(device) for name, tensor in part.items()}
            for part in (self._mean, self._diagonal, self._factors)
        )
        return LowRankPosterior(mean, diagonal, factors, self._metadata)

    def dense_covariance(self, name: str) -> Tensor:
        own = DiagonalPosterior(self._mean, self._diagonal).dense_covariance(name)
        parts = [part for part in (name, f"{name}.weight", f"{name}.bias") if part in self._mean]
        rank = self.rank
        columns = [
            self._factors[part].reshape(rank, self._mean[part].shape[0] if self._mean[part].dim() else 1, -1)
            if part in self._factors
            else self._mean[part]
            .new_zeros((rank, *self._mean[part].shape))
            .reshape(rank, len(self._mean[part]), -1)
            for part in parts
        ]  # (K, out, in); a bias is one more column of [W b]
        flat = torch.cat(columns, dim=2).mT.reshape(rank, -1)
        return own + flat.T @ flat

    def tensors(self) -> Weights:
        named = (("mean", self._mean), ("diagonal", self._diagonal), ("factors", self._factors))
        return {f"{part}/{name}": tensor for part, tensors in named for name, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Weights, metadata: Mapping[str, object]) -> "LowRankPosterior":
        mean, diagonal, factors = (
            {key.removeprefix(part): tensor for key, tensor in tensors.items() if key.startswith(part)}
            for part in ("mean/", "diagonal/", "factors/")
        )
        return cls(mean, diagonal, factors, metadata)

    def __repr__(self) -> str:
        weights = sum(tensor.numel() for tensor in self._diagonal.values())
        return (
            f"LowRankPosterior({weights:,} weights in {len(self._diagonal)} tensors, rank {self.rank},"
            f" {len(self.deterministic)} deterministic tensors, {self._metadata})"
        )

    def _log_det(self) -> Tensor:
        diagonal, factors = self._flat()
        inner: Tensor = torch.linalg.slogdet(self._capacitance(diagonal, factors)).logabsdet
        return diagonal.log().sum() + inner

    def _capacitance(self, diagonal: Tensor, factors: Tensor) -> Tensor:
        """I + Fᵀ diag(σ⁻²) F, (K, K)."""
        return (
            torch.eye(len(factors), dtype=torch.float64, device=self.device)
            + (factors / diagonal) @ factors.T
        )

    def _flat(self) -> tuple[Tensor, Tensor]:
        """σ² (P,) and Fᵀ (K, P) of all weights, in float64."""
        empty = torch.zeros(0, dtype=torch.float64, device=self.device)
        diagonal = [tensor.double().flatten() for tensor in self._diagonal.values()]
        factors = [self._factors[name].double().flatten(1) for name in self._diagonal]
        return torch.cat([empty, *diagonal]), torch.cat(factors, 1) if factors else empty.view(0, 0)

    def _scaled(self, factor: float) -> "LowRankPosterior":
        diagonal = {name: tensor * factor for name, tensor in self._diagonal.items()}
        factors = {name: tensor * factor**0.5 for name, tensor in self._factors.items()}
        return LowRankPosterior(self._mean, diagonal, factors, self._metadata_scaled(factor))

    def _check_factors(self) -> None:
        ranks = {len(tensor) if tensor.dim() else 0 for tensor in self._factors.values()}
        if len(ranks) > 1:
            raise InvalidValue(f"factors must have one rank for all names, got {sorted(ranks)}")
        rows = {n: t[0] for n, t in self._factors.items() if t.dim() and len(t)}
        if not rows:
            raise InvalidValue("factors must have a rank of at least 1; use DiagonalPosterior without them")
        wrong = mismatches({name: v.shape for name, v in self._diagonal.items()}, rows)
        if wrong:
            raise InvalidValue(f"diagonal and factors do not fit: {wrong}")
        for name, tensor in self._factors.items():
            if not bool(tensor.isfinite().all()):
                raise InvalidValue(f"factors of {name!r} are not finite")

    def _check_same_weights(self, argument: str, other: Mapping[str, Tensor]) -> None:
        wrong = mismatches({name: v.shape for name, v in self._diagonal.items()}, other)
        if wrong:
            raise InvalidValue(f"{argument} and the posterior hold different weights: {wrong}")
