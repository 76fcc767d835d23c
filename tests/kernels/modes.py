"""What every kernel is tested with: the reference and each instruction set of this machine, in both types."""

import pytest
import torch
from torch import Tensor

from credo.kernels import native

MODES = ("off", *native.available())
TYPES = (torch.float64, torch.float32)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

every_mode = pytest.mark.parametrize("mode", MODES)
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def assert_close(actual: Tensor, truth: Tensor, scale: Tensor | None = None) -> None:
    """Relative to the largest element of the float64 truth, or of `scale` where the truth is a difference."""
    assert actual.shape == truth.shape
    if truth.numel():
        largest = (truth if scale is None else scale).abs().max()
        error = (actual.double() - truth).abs().max()
        assert error <= TOLERANCE[actual.dtype] * largest, f"{error:.2e}, where the largest is {largest:.2e}"
