"""The observation noise of regression, as the user gives it."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

Noise: TypeAlias = float | Tensor | Literal["model"] | None


def noise_variance(noise: object) -> Tensor | None:
    """The given variance as a tensor; None if there is none, or if the model tells it."""
    if noise is None or (isinstance(noise, str) and noise == "model"):
        return None
    if isinstance(noise, bool) or not isinstance(noise, int | float | Tensor):
        raise InvalidType(f"noise must be a variance (number or tensor), 'model' or None, got {noise!r:.80}")
    variance = torch.as_tensor(noise).detach()
    if variance.is_complex() or variance.dtype == torch.bool:
        raise InvalidType(f"noise must be a real variance, got a tensor of {variance.dtype}")
    if not bool((variance.isfinite() & (variance >= 0)).all()):
        raise InvalidValue(f"noise is a variance and must be finite and >= 0, got {noise!r:.80}")
    return variance
