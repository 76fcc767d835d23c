"""The mean-field Gaussian: q(w) = Π N(wⱼ; μⱼ, σⱼ²). What VOGN, OGN, IVON and Bayes by Backprop leave."""

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from credo.errors import InvalidValue, UnsupportedOperation
from credo.kernels.stacked_noise import sample_rows_
from credo.posterior.base import Posterior, Prior, Weights, check_generator, keys
from credo.posterior.files import register_kind
from credo.validate import json_copy, mismatches, named_tensors, positive

LOG_2PI = math.log(2 * math.pi)


@final
@register_kind
class DiagonalPosterior(Posterior):
    """N(μ, diag σ²) by parameter name, in float32 or wider.

    A name that `variance` lacks, or for which it is zero throughout, is deterministic; elsewhere every
    variance is positive and finite. The order of the names in `mean` is the order in which draws use the
    random stream, so it is kept in files.
    """

    kind: ClassVar[str] = "diagonal"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self._mean = named_tensors("mean", mean)
        self._variance = _random_part(named_tensors("variance", variance))
        self._metadata = json_copy("metadata", metadata or {})
        _check_moments(self._mean, self._variance)

    @property
    def mean(self) -> Weights:
        return dict(self._mean)

    @property
    def variance(self) -> Weights:
        return {
            name: self._variance[name] if name in self._variance else mean.new_zeros(()).expand(mean.shape)
            for name, mean in self._mean.items()
        }

    @property
    def deterministic(self) -> frozenset[str]:
        return frozenset(self._mean.keys() - self._variance.keys())

    @property
    def metadata(self) -> dict[str, object]:
        return json_copy("metadata", self._metadata)

    def sample_many(self, generator: torch.Generator | None, n: int) -> Weights:
        """w = μ + σ·ε, with one row of ε per draw; names in the order of `mean`."""
        generator = check_generator(self._own_generator() if generator is None else generator, self.device)
        draws = {name: mean.new_empty((n, *mean.shape)) for name, mean in self._mean.items()}
        for name in self.deterministic:
            draws[name].copy_(self._mean[name])
        names = [name for name in self._mean if name in self._variance]
        means, variances = (
            [part[name].contiguous() for name in names] for part in (self._mean, self._variance)
        )
        seeds = keys(generator, n)
        if names:
            sample_rows_([draws[name] for name in names], means, variances, seeds)
        return draws

    def kl(self, prior: Prior) -> Tensor:
        """Σⱼ ½(rⱼ − 1 − log rⱼ + (μⱼ−μ₀ⱼ)²/σ₀ⱼ²), r = σ²/σ₀²; p = N(0, 1/δ) when `prior` is a number δ."""
        if not isinstance(prior, Posterior):
            return self._kl_to_precision(positive("prior", prior))
        if not isinstance(prior, DiagonalPosterior):
            raise UnsupportedOperation(
                f"the KL from a diagonal posterior to a {type(prior).__name__} is not known here;"
                " use DiagonalPosterior(prior.mean, prior.variance)"
            )
        self._check_same_weights("prior", prior._variance)
        there = prior.to(self.device)
        terms = (
            kl_terms(self._mean[name], variance, there._mean[name], there._variance[name])
            for name, variance in self._variance.items()
        )
        return sum_terms(terms, self.device)

    def entropy(self) -> Tensor:
        return sum_terms(map(entropy_terms, self._variance.values()), self.device)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        self._check_same_weights(
            "weights", {name: value for name, value in weights.items() if name not in self.deterministic}
        )
        terms = (
            log_prob_terms(weights[name].to(self.device), self._mean[name], variance)
            for name, variance in self._variance.items()
        )
        return sum_terms(terms, self.device)

    def to(self, device: torch.device | str) -> "DiagonalPosterior":
        mean, variance = (
            {name: tensor.to(device) for name, tensor in part.items()}
            for part in (self._mean, self._variance)
        )
        buffers = {name: tensor.to(device) for name, tensor in self._buffers.items()}
        return DiagonalPosterior(mean, variance, self._metadata).with_buffers(buffers)

    def _scaled(self, factor: float) -> "DiagonalPosterior":
        variance = {name: scaled_variance(name, v, factor) for name, v in self._variance.items()}
        return DiagonalPosterior(self._mean, variance, self._metadata_scaled(factor))

    def dense_covariance(self, name: str) -> Tensor:
        parts = [part for part in (name, f"{name}.weight", f"{name}.bias") if part in self._mean]
        if not parts:
            raise InvalidValue(f"no layer or parameter is called {name!r}; there are {', '.join(self._mean)}")
        blocks = [_as_matrix(self.variance[part]) for part in parts]  # [W b]: a bias is one more column
        return torch.cat(blocks, dim=1).T.reshape(-1).diag()

    def tensors(self) -> Weights:
        mean = {f"mean/{name}": tensor for name, tensor in self._mean.items()}
        return mean | {f"variance/{name}": tensor for name, tensor in self._variance.items()}

    @classmethod
    def from_tensors(cls, tensors: Weights, metadata: Mapping[str, object]) -> "DiagonalPosterior":
        mean, variance = (
            {key.removeprefix(part): tensor for key, tensor in tensors.items() if key.startswith(part)}
            for part in ("mean/", "variance/")
        )
        return cls(mean, variance, metadata)

    def __repr__(self) -> str:
        weights = sum(variance.numel() for variance in self._variance.values())
        return (
            f"DiagonalPosterior({weights:,} weights in {len(self._variance)} tensors,"
            f" {len(self.deterministic)} deterministic tensors, {self._metadata})"
        )

    def _kl_to_precision(self, precision: float) -> Tensor:
        mean, variance = (
            torch.tensor(v, dtype=torch.float64, device=self.device) for v in (0.0, 1 / precision)
        )
        terms = (kl_terms(self._mean[name], own, mean, variance) for name, own in self._variance.items())
        return sum_terms(terms, self.device)

    def _check_same_weights(self, argument: str, other: Mapping[str, Tensor]) -> None:
        wrong = mismatches({name: v.shape for name, v in self._variance.items()}, other)
        if wrong:
            raise InvalidValue(f"{argument} and the posterior hold different weights: {wrong}")


def scaled_variance(name: str, variance: Tensor, factor: float) -> Tensor:
    """factor·σ², or an error where that leaves the dtype's range: a variance of 0 would pass for certainty."""
    scaled = variance * factor
    if not bool((scaled.isfinite() & (scaled > 0)).all()):
        raise InvalidValue(
            f"factor={factor:g} takes variances of {name!r} out of the range of {variance.dtype};"
            " choose one nearer to 1"
        )
    return scaled


def _as_matrix(tensor: Tensor) -> Tensor:
    """(out, all the rest); a vector is one column."""
    return tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.reshape(tensor.shape[0], -1)


def _random_part(variance: Weights) -> Weights:
    return {name: tensor for name, tensor in variance.items() if tensor.numel() == 0 or bool(tensor.any())}


def _check_moments(mean: Weights, variance: Weights) -> None:
    if not mean:
        raise InvalidValue("mean is empty; a posterior holds at least one tensor")
    devices = {tensor.device for tensor in [*mean.values(), *variance.values()]}
    if len(devices) > 1:
        raise InvalidValue(f"mean and variance lie on several devices ({devices}); move them to one")
    wrong = mismatches({name: mean[name].shape for name in variance if name in mean}, variance)
    if wrong:
        raise InvalidValue(f"mean and variance do not fit: {wrong}")
    for name, tensor in mean.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidValue(f"mean of {name!r} is not finite")
    for name, tensor in variance.items():
        if not bool((tensor.isfinite() & (tensor > 0)).all()):
            raise InvalidValue(
                f"variance of {name!r} is not positive and finite everywhere; leave it out if certain"
            )


def sum_terms(terms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of independent Gaussians, accumulated in float64."""
    return sum((term.sum() for term in terms), torch.zeros((), dtype=torch.float64, device=device))


def kl_terms(mean: Tensor, variance: Tensor, prior_mean: Tensor, prior_variance: Tensor) -> Tensor:
    """½(r − 1 − log r + (μ−μ₀)²/σ₀²) with r = σ²/σ₀², per weight."""
    mean, variance, prior_mean, prior_variance = (
        t.double() for t in (mean, variance, prior_mean, prior_variance)
    )
    excess = (variance - prior_variance) / prior_variance  # r − 1, without cancellation when q is near p
    return 0.5 * (excess - torch.log1p(excess) + (mean - prior_mean) ** 2 / prior_variance)


def entropy_terms(variance: Tensor) -> Tensor:
    """½(1 + log 2πσ²), per weight."""
    return 0.5 * (1 + LOG_2PI + variance.double().log())


def log_prob_terms(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """−½(log 2πσ² + (w−μ)²/σ²), per weight."""
    value, mean, variance = value.double(), mean.double(), variance.double()
    return -0.5 * (LOG_2PI + variance.log() + (value - mean) ** 2 / variance)
