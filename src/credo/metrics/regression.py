"""How good predicted means and variances are. Each score is a mean over all predicted numbers, outputs included.

Variances that are zero are allowed: the NLL of a wrong value is then infinite, and rightly so, the CRPS is the absolute
error, and the interval is a point.
"""

import math

from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.metrics.targets import value_targets


def rmse(mean: Tensor, targets: Tensor) -> float:
    """√(1/N Σ (yᵢ − μᵢ)²)."""
    return _errors(mean, targets).square().mean().sqrt().item()


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """1/N Σ ½(log 2πσᵢ² + (yᵢ − μᵢ)²/σᵢ²), in nats."""
    errors = _errors(mean, targets)
    return each_gaussian_nll(errors, _variance(variance, errors)).mean().item()


def crps(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """The continuous ranked probability score of N(μ, σ²), ∫ (F(z) − [y ≤ z])² dz, in the targets' units.

    = σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π), z = (y − μ)/σ. Smaller is better; for σ = 0 it is |y − μ|.
    """
    errors = _errors(mean, targets)
    sigma = _variance(variance, errors).sqrt()
    z = (errors / sigma).nan_to_num(0.0)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    scores = errors * (z / math.sqrt(2)).erf() + sigma * (2 * density - 1 / math.sqrt(math.pi))
    return scores.where(sigma > 0, errors.abs()).mean().item()


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, level: float = 0.95) -> float:
    """The share of targets inside the central interval that holds `level` of N(μ, σ²); calibrated is `level` itself."""
    if isinstance(level, bool) or not isinstance(level, int | float):
        raise InvalidType(f"level={level!r} is a {type(level).__name__}; give a number, 0 < level < 1")
    if not 0 < level < 1:
        raise InvalidValue(f"level={level} is outside 0 < level < 1; 0.95 is the usual choice")
    errors = _errors(mean, targets)
    width = errors.new_tensor(float(level)).erfinv() * math.sqrt(2)
    inside = errors.abs() <= width * _variance(variance, errors).sqrt()
    return inside.double().mean().item()


def each_gaussian_nll(errors: Tensor, variance: Tensor) -> Tensor:
    nll = 0.5 * (errors.square() / variance + (2 * math.pi * variance).log())
    return nll.where(variance > 0, math.inf * (2 * (errors != 0).to(nll) - 1))


def _errors(mean: object, targets: object) -> Tensor:
    """y − μ in float64, checked."""
    if not isinstance(mean, Tensor) or not mean.is_floating_point():
        raise InvalidType(f"mean must be a floating-point tensor, got {type(mean).__name__}")
    if mean.numel() == 0:
        raise InvalidValue(f"mean has shape {tuple(mean.shape)}: no examples, so there is nothing to measure")
    values = value_targets(mean.detach(), targets)
    for name, tensor in (("mean", mean), ("targets", values)):
        if not bool(tensor.isfinite().all()):
            raise InvalidValue(f"{name} holds numbers that are not finite; there is no score for them")
    return values - mean.detach().double()


def _variance(variance: object, errors: Tensor) -> Tensor:
    if not isinstance(variance, Tensor) or not variance.is_floating_point():
        raise InvalidType(f"variance must be a floating-point tensor, got {type(variance).__name__}")
    if variance.shape != errors.shape:
        raise InvalidValue(
            f"variance has shape {tuple(variance.shape)} and mean {tuple(errors.shape)}; give one for each mean"
        )
    if not bool((variance >= 0).all()):
        raise InvalidValue("variance holds numbers below 0 or NaN; a variance is at least 0")
    return variance.detach().to(errors.device).double()
