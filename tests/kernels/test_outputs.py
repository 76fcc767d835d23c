"""Noise on outputs: z and its slope against plain arithmetic with the same noise."""

import pytest
import torch

from credo.kernels import forced, noise, outputs
from tests.kernels.modes import assert_close, every_mode, every_type

KEY = 3, 5, 7  # seed, stream, index


def noise_like(tensor: torch.Tensor) -> torch.Tensor:
    epsilon = torch.empty_like(tensor)
    noise.normal_(epsilon, *KEY)
    return epsilon


@every_mode
@every_type
@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (0, 3), (7, 5, 3), (301, 97)], ids=str)
@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
def test_outputs_and_slopes(mode, dtype, shape, memory_format):
    if memory_format is not None:
        shape = (2, 3, *shape[:1], 4) if shape[:1] else (2, 3, 5, 4)
    mean, variance = torch.randn(shape).to(dtype), torch.rand(shape).to(dtype) + 0.1
    if memory_format is not None:
        mean, variance = (t.contiguous(memory_format=memory_format) for t in (mean, variance))
    with forced(mode):
        epsilon = noise_like(mean).double()
        sd = variance.double().sqrt()
        expected = mean.double() + sd * epsilon, epsilon / (2 * sd)
        outputs.perturb_(mean, variance, *KEY)
    assert_close(mean, expected[0])
    assert_close(variance, expected[1])


@every_mode
@every_type
def test_no_variance_is_no_noise_and_a_finite_slope(mode, dtype):
    mean, variance = torch.ones(70, dtype=dtype), torch.zeros(70, dtype=dtype)
    with forced(mode):
        outputs.perturb_(mean, variance, *KEY)
    torch.testing.assert_close(mean, torch.ones(70, dtype=dtype))
    assert bool(variance.isfinite().all())


def test_half_precision_means_take_float32_noise(both_kernels):
    mean, variance = torch.zeros(50, dtype=torch.bfloat16), torch.ones(50)
    outputs.perturb_(mean, variance, *KEY)
    torch.testing.assert_close(mean.float(), noise_like(variance), rtol=1e-2, atol=1e-2)
