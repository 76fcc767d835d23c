"""Dropout whose masks are numbers one can have again: a function of a key, the place of the call and the shape.

A mask has no dimension for examples: it is one function, which all examples of all batches meet. Torch draws a
mask per example; for each example by itself that is the same distribution.
"""

import hashlib
from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALPHA = 1.7580993408473766  # SELU's limit for very negative inputs, as torch.nn.AlphaDropout has it

WHOLE_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
KEEPS_MOMENTS = {F.alpha_dropout, F.feature_alpha_dropout}
DROPOUTS = {F.dropout, torch.dropout, torch.dropout_, *WHOLE_CHANNELS, *KEEPS_MOMENTS}


def derived_key(*parts: int) -> int:
    """63 bits that are the same everywhere and look unrelated for neighbouring parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FixedMasks(TorchFunctionMode):
    """Inside, every call of a dropout function drops what the key and the number of the call say."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key, self._calls = key, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        return self._dropped(func, *args, **(kwargs or {}))

    def _dropped(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool | None = None,  # torch.dropout's word for `training`
    ) -> Tensor:
        if not (training if train is None else train) or p == 0:
            return input
        kept = self._kept(input, p, func in WHOLE_CHANNELS)
        result = _keeping_moments(input, kept, p) if func in KEEPS_MOMENTS else _scaled(input, kept, p)
        return input.copy_(result) if inplace or func is torch.dropout_ else result

    def _kept(self, input: Tensor, p: float, whole_channels: bool) -> Tensor:
        """Made on the CPU, so that all devices drop the same."""
        shape = (1, *input.shape[1:2], *(1 for _ in input.shape[2:])) if whole_channels else input.shape[1:]
        generator = torch.Generator().manual_seed(derived_key(self._key, self._calls))
        self._calls += 1
        return (torch.rand(shape, generator=generator) >= p).to(input.device)


def _scaled(input: Tensor, kept: Tensor, p: float) -> Tensor:
    """x·m/(1−p)."""
    return torch.zeros_like(input) if p == 1 else input * (kept.to(input.dtype) / (1 - p))


def _keeping_moments(input: Tensor, kept: Tensor, p: float) -> Tensor:
    """a·(x where kept, else −α) + b, with a and b such that mean 0 and variance 1 stay."""
    if p == 1:
        return torch.zeros_like(input)
    a = 1 / sqrt((1 - p) * (1 + p * ALPHA**2))
    return a * torch.where(kept, input, -ALPHA) + a * ALPHA * p
