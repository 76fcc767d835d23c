"""10⁷ draws of the noise against the distribution they should have: |z| < 5 in every test."""

import math

import pytest
import torch
from torch import Tensor

from credo.kernels import forced, noise, philox
from credo.kernels.noise import PART

COUNT = 10_000_000
DTYPES = [torch.float32, torch.float64]
KEYS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1 << 48, 0), (1 << 32, 0, 0)]  # seed, stream, index


SOURCES = [
    *((dtype, False) for dtype in DTYPES),
    *((dtype, True) for dtype in DTYPES),
]  # and whether it is the reference's


def draw(
    dtype: torch.dtype, count: int = COUNT, key: tuple[int, int, int] = KEYS[0], sampled: bool = False
) -> Tensor:
    """From the counter, or what the reference makes samples with."""
    out = torch.zeros(count, dtype=dtype)
    if not sampled:
        noise.normal_(out, *key)
        return out
    seed, stream, index = key
    with forced("off"):
        noise.sample_(out, torch.zeros_like(out), 1.0, 1.0, seed, stream, index)
    return out


@pytest.fixture(scope="module", params=SOURCES, ids=str)
def draws(request) -> Tensor:
    dtype, sampled = request.param
    return draw(dtype, sampled=sampled).double()


def upper_tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def test_moments(draws):
    """Var(xᵏ) = E x²ᵏ − (E xᵏ)², with E x², x⁴, x⁶, x⁸ = 1, 3, 15, 105."""
    even = {2: 1, 4: 3, 6: 15, 8: 105}
    power = torch.ones_like(draws)
    for k in range(1, 5):
        power *= draws
        expected = even.get(k, 0)
        spread = math.sqrt((even[2 * k] - expected**2) / COUNT)
        assert abs(power.mean().item() - expected) < 5 * spread, f"moment {k}"


def test_kolmogorov_smirnov(draws):
    ordered = draws.sort().values
    theory = torch.special.ndtr(ordered)
    rank = torch.arange(COUNT, dtype=torch.float64)
    distance = max((theory - rank / COUNT).max().item(), ((rank + 1) / COUNT - theory).max().item())
    assert distance * math.sqrt(COUNT) < 2.6  # exceeded once in 350 000 times


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 4.0, 4.5, 5.0])
def test_tails(draws, limit):
    expected = COUNT * upper_tail(limit)
    for count in ((draws > limit).sum().item(), (draws < -limit).sum().item()):
        assert abs(count - expected) < 5 * math.sqrt(expected) + 1


def test_lags(draws):
    """Also those at which lanes of a tile, tiles, halves of a part or parts would meet if they shared bits."""
    for name, x in {"numbers": draws, "squares": (draws**2 - 1) / math.sqrt(2)}.items():
        for lag in [*range(1, 9), 16, 31, 32, 33, 63, 64, 65, 128, PART // 2, PART]:
            z = (x[:-lag] @ x[lag:]).item() / math.sqrt(COUNT - lag)
            assert abs(z) < 5, f"{name} at lag {lag}: {z}"


@pytest.mark.parametrize(("dtype", "sampled"), SOURCES)
def test_different_keys_are_independent(dtype, sampled):
    streams = torch.stack([draw(dtype, COUNT // 10, key, sampled) for key in KEYS]).double()
    for x in (streams, (streams**2 - 1) / math.sqrt(2)):
        z = (x @ x.T / math.sqrt(x.shape[1])).fill_diagonal_(0)
        assert z.abs().max() < 5


def test_no_numbers_are_shared_between_lanes_or_tiles():
    drawn = draw(torch.float64, 2_000_000)
    assert drawn.abs().unique().numel() == drawn.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_fill_their_range_evenly(dtype):
    tile = torch.arange(40_000)
    radius, angle = philox.lane_bits(tile, torch.zeros_like(tile), 0, 0, dtype)
    quadrant = (angle & 3).double()
    u, x = philox.uniforms(radius, angle, dtype)
    unit = x / (math.pi / 2) + 0.5
    quadrants = (quadrant + unit.double()) / 4
    for values in (u.double(), unit.double(), quadrants):
        counts = torch.histc(values, bins=1024, min=0, max=1)
        chi_square = ((counts - values.numel() / 1024) ** 2).sum().item() / (values.numel() / 1024)
        assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023)


def test_the_largest_numbers_are_far_out():
    """u reaches 2⁻³¹ in float32 and 2⁻⁵³ in float64."""
    for dtype, limit in ((torch.float32, 6.5), (torch.float64, 8.5)):
        u, _ = philox.uniforms(*torch.zeros(2, 1, dtype=torch.int64), dtype)
        assert (-2 * u.log()).sqrt().item() > limit
