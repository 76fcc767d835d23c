"""The check that all numbers of a step are finite, by itself and as part of an update."""

import pytest
import torch

from credo.kernels import update
from credo.optim.vogn import averaged_update

SETTINGS = update.VOGNNumbers(
    lr=0.05, beta1=0.9, beta2=0.2, damping=0.01, gradient_scale=0.5, squares_scale=0.125
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 7, 63, 64, 99_999, 100_002])
def test_one_number_that_is_not_finite_is_found(both_kernels, dtype, bad, place):
    tensors = [torch.zeros(3, dtype=dtype), torch.ones(100_003, dtype=dtype), torch.zeros(0, dtype=dtype)]
    assert update.all_finite(tensors)
    tensors[1][place] = bad
    assert not update.all_finite(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("row", [3, 4], ids=["gradient", "squares"])
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0, 1e30])
def test_an_update_that_is_not_finite_changes_nothing(both_kernels, dtype, bad, row, other):
    """Whatever the gradient is where the square is not finite, or the square where the gradient is not."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(7, 11, dtype=dtype, generator=generator) for _ in range(5)]
    tensors[7 - row][3, 4], tensors[row][3, 4] = other, bad
    before = [tensor.clone() for tensor in tensors]
    rows = [[tensor] for tensor in tensors]
    assert not update.vogn_(averaged_update, *rows, 0.3, None, SETTINGS, check=True)
    assert all(torch.equal(t, b) for t, b in zip(tensors[:3], before, strict=False))


def test_an_update_of_large_finite_numbers_is_made(both_kernels):
    """Products of gradients and squares overflow here, and the numbers themselves do not."""
    rows = [[torch.full((5,), value)] for value in (1.0, 0.0, 1.0, 1e30, 1e30)]
    assert update.vogn_(averaged_update, *rows, 0.3, None, SETTINGS, check=True)
    assert rows[1][0].min() > 1e28


def test_large_and_small_numbers_are_finite(both_kernels):
    for dtype in (torch.float32, torch.float64, torch.float16):
        extreme = torch.finfo(dtype)
        numbers = torch.tensor([extreme.max, extreme.min, extreme.tiny, extreme.tiny / 4, -0.0], dtype=dtype)
        assert update.all_finite([numbers] * 9)
        assert update.all_finite([torch.full((1000,), extreme.max, dtype=dtype)])


def test_lists_of_any_kind_are_looked_at(both_kernels):
    assert update.all_finite([])
    mixed = [torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(6, 4)[:, ::2], torch.tensor(1.0)]
    assert update.all_finite(mixed)
    mixed[2][5, 1] = float("nan")
    assert not update.all_finite(mixed)
    assert not update.all_finite([mixed[2]])
