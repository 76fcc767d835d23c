"""The fused update and the way back to the mean, against plain arithmetic in every mode and type."""

import pytest
import torch

from credo.kernels import forced, update
from credo.optim.ivon import ivon_update
from tests.kernels.modes import assert_close, every_mode, every_type

SHAPES = [(), (1,), (63,), (4, 16), (0, 3), (7, 5, 3, 3), (301, 97)]
SETTINGS = update.IVONNumbers(0.05, 0.9, 0.8, 1.7, float("inf"), 0.5, 0.125)


def operands(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """μ, m, h, gradient, product, prior, prior mean."""
    generator = torch.Generator().manual_seed(seed)
    signed = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(5)]
    positive = [torch.rand(shape, dtype=dtype, generator=generator) + 0.1 for _ in range(2)]
    return [signed[0], signed[1], positive[0], signed[2], signed[3], positive[1], signed[4]]


def equations(mu, m, h, gradient, product, prior, prior_mean, s: update.IVONNumbers):
    hat = s.product_unit * product * (h + prior)
    m = s.beta1 * m + (1 - s.beta1) * s.gradient_unit * gradient
    new = s.beta2 * h + (1 - s.beta2) * hat + 0.5 * (1 - s.beta2) ** 2 * (h - hat) ** 2 / (h + prior)
    step = (s.correction * m + prior * (mu - prior_mean)) / (new + prior)
    return mu - s.lr * step.clamp(-s.radius, s.radius), m, new


@every_mode
@every_type
@pytest.mark.parametrize("prior_tensor", [False, True])
@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize("radius", [float("inf"), 0.3])
def test_the_update_is_its_equations(mode, dtype, prior_tensor, with_mean, radius):
    settings, rows = SETTINGS._replace(radius=radius), [operands(shape, dtype) for shape in SHAPES]
    expected = [
        equations(
            *(t.double() for t in row[:5]),
            row[5].double() if prior_tensor else 0.3,
            row[6].double() if with_mean else 0.0,
            settings,
        )
        for row in rows
    ]
    columns = [[row[k] for row in rows] for k in range(7)]
    with forced(mode):
        update.ivon_(
            ivon_update,
            *columns[:5],
            columns[5] if prior_tensor else 0.3,
            columns[6] if with_mean else None,
            settings,
        )
    for row, wanted in zip(rows, expected, strict=True):
        for found, truth in zip(row[:3], wanted, strict=True):
            assert_close(found, truth)


@every_mode
@every_type
@pytest.mark.parametrize("add", [False, True])
def test_the_way_back_takes_the_products(mode, dtype, add):
    rows = [operands(shape, dtype)[:4] for shape in SHAPES]
    truths = [(g * (w - mu)).double() + (old.double() if add else 0) for w, mu, old, g in rows]
    means = [row[1].clone() for row in rows]
    with forced(mode):
        update.restore_(*([row[k] for row in rows] for k in range(4)), add)
    for (weight, mean, product, _), truth, before in zip(rows, truths, means, strict=True):
        assert torch.equal(weight, before)
        assert torch.equal(mean, before)
        assert_close(product, truth)


def test_layouts_in_memory_do_not_mix_up_elements(both_kernels):
    row = operands((8, 6, 3, 3), torch.float64)[:5]
    expected = equations(*row, 0.3, 0.0, SETTINGS)
    for k in (0, 3):
        row[k] = row[k].to(memory_format=torch.channels_last)
    update.ivon_(ivon_update, *([tensor] for tensor in row), 0.3, None, SETTINGS)
    for found, wanted in zip(row[:3], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_empty_lists_and_half_precision(both_kernels):
    update.ivon_(ivon_update, [], [], [], [], [], 0.3, None, SETTINGS)
    update.restore_([], [], [], [], False)
    row = operands((100,), torch.float32)[:5]
    row[0], row[3] = row[0].bfloat16(), row[3].bfloat16()
    expected = equations(*(tensor.float() for tensor in row), 0.3, 0.0, SETTINGS)
    update.ivon_(ivon_update, *([tensor] for tensor in row), 0.3, None, SETTINGS)
    for found, wanted in zip(row[:3], expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
