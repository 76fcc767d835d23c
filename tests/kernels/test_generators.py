"""The noise of the pure path: the numbers of its description, however they are asked for."""

import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from credo.kernels import generators

DTYPES = [torch.float32, torch.float64]
SEED, INDEX = 2**64 - 12345, 7
MASK = 2**64 - 1


def drawn(size: int, stream: int, dtype=torch.float32, seed: int = SEED) -> Tensor:
    """A row of two tensors, as one."""
    noises = [
        torch.cat(noises)
        for _, noises in generators.draw([size // 3, size - size // 3], seed, stream, INDEX, dtype)
    ]
    return torch.cat(noises)


@pytest.fixture(autouse=True)
def _nothing_is_ready(monkeypatch):
    monkeypatch.setattr(generators, "_own", generators._Own())


def words(key: bytes) -> Iterator[int]:
    """SFC64, in Python's own arithmetic."""
    a, b, c, counter = struct.unpack("<4Q", blake2b(key, digest_size=32).digest())
    while True:
        word = (a + b + counter) & MASK
        counter = (counter + 1) & MASK
        a, b, c = b ^ b >> 11, (c + (c << 3)) & MASK, ((c << 24 | c >> 40) + word) & MASK
        yield word


def plain_normals(size: int, stream: int, block: int, bits: int) -> list[float]:
    """One after the other, straight from the description; u has so many bits."""
    key, pairs = struct.pack("<4Q", SEED, stream, INDEX, block), -(-size // 8) * 4
    source = words(key)
    stretch = b"".join(struct.pack("<Q", next(source)) for _ in range(pairs * bits * 3 // 128))
    of_u, of_angle = {32: ("i", "h"), 64: ("q", "i")}[bits]
    us = struct.unpack(f"<{pairs}{of_u}", stretch[: pairs * bits // 8])
    angles = struct.unpack(f"<{pairs}{of_angle}", stretch[pairs * bits // 8 :])
    lengths = [math.sqrt(-2 * math.log(abs(u) / 2 ** (bits - 1))) for u in us]
    turns = [math.pi * angle / 2 ** (bits // 2 - 1) for angle in angles]
    cosines = [length * math.cos(turn) for length, turn in zip(lengths, turns, strict=True)]
    sines = [length * math.sin(turn) for length, turn in zip(lengths, turns, strict=True)]
    return [*cosines, *sines][:size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 8, 301])
def test_the_numbers_are_those_of_the_description(monkeypatch, size, dtype):
    monkeypatch.setattr(generators, "BLOCK", 256)
    generators._blocks.cache_clear()
    found = drawn(size, 2**63 + 5, dtype).double()
    generators._blocks.cache_clear()
    blocks = [(k, min(256, size - 256 * k)) for k in range(-(-size // 256))]
    expected = [x for k, own in blocks for x in plain_normals(own, 2**63 + 5, k, 8 * dtype.itemsize)]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_ahead_they_are_the_same(monkeypatch, dtype):
    """Streams in order, again, backwards, and from the middle, as after a resume."""
    monkeypatch.setattr(generators, "AHEAD", 5 * 1001)
    alone = []
    for stream in range(20):
        monkeypatch.setattr(generators, "_own", generators._Own())
        alone.append(drawn(1001, stream, dtype))
    for order in [range(20), [3, 4, 5, 5, 4, 3, 4, 19, 5, 6, 7, 0, 1], reversed(range(20))]:
        monkeypatch.setattr(generators, "_own", generators._Own())
        assert all(torch.equal(drawn(1001, stream, dtype), alone[stream]) for stream in order)


def test_only_streams_that_follow_each_other_are_drawn_ahead(monkeypatch):
    monkeypatch.setattr(generators, "AHEAD", 5 * 1001)
    numbers, normals = [], generators.normals

    def counted(pieces, keys, dtype):
        numbers.append(len(keys))
        return normals(pieces, keys, dtype)

    monkeypatch.setattr(generators, "normals", counted)
    for stream in [0, 20, 30, 31, 32, 35, 36, 2**64 - 2, 2**64 - 1]:
        drawn(1001, stream)
    assert numbers == [1, 1, 1, 5, 5, 1, 1]


def test_little_lies_ready(monkeypatch):
    monkeypatch.setattr(generators, "AHEAD", 5 * 1001)
    for seed in range(3 * generators.ROWS):
        for stream in range(3):
            drawn(1001, stream, seed=seed)
    supplies = generators._own._supplies.values()
    assert len(supplies) == generators.ROWS
    assert all(len(supply._noises) == 5 for supply in supplies)


def test_a_tiny_network_does_not_draw_for_thousands_of_steps(monkeypatch):
    monkeypatch.setattr(generators, "_own", generators._Own())
    for stream in range(3):
        drawn(15, stream)
    (supply,) = generators._own._supplies.values()
    assert len(supply._noises) == generators.STREAMS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2049, 40_001, 100_003, generators.BLOCK + 70_001])
def test_the_number_of_threads_changes_nothing(monkeypatch, size, dtype):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            monkeypatch.setattr(generators, "_own", generators._Own())  # or the first would lie ready for all
            results.append(drawn(size, 3, dtype))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_another_default_device_does_not_matter():
    with torch.device("meta"):
        elsewhere = drawn(1001, 3)
    assert elsewhere.is_cpu
    assert torch.equal(elsewhere, drawn(1001, 3))


def test_python_threads_do_not_meet():
    expected = [drawn(50_000, stream, seed=seed) for seed in range(4) for stream in range(5)]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda seed: [drawn(50_000, k, seed=seed) for k in range(5)], range(4))
        found = [own for each in results for own in each]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range_are_finite(dtype):
    """u = 0 is the largest number of all, and u = ±1 is zero."""
    bits = 8 * dtype.itemsize
    u = torch.tensor([0, 1, -1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1], dtype=dtype)
    angle = torch.zeros_like(u)
    generators.box_muller_(u, angle, 2.0 ** (1 - bits))
    assert torch.equal(angle, torch.zeros_like(u))
    assert u[0] > u[1] == u[2] > {32: 6.5, 64: 9}[bits]
    assert torch.equal(u[3:], torch.zeros_like(u[3:]))


def test_moments_over_all_angles_are_exact():
    """Σ cosʲθ sinᵏθ over 2¹⁶ angles, of degrees to 12: (j−1)!!(k−1)!!/(j+k)!!, and zero where one is odd."""
    angle = torch.arange(-(2**15), 2**15, dtype=torch.float64)
    u = torch.full_like(angle, 2**31 * math.exp(-0.5))  # of length 1
    generators.box_muller_(u, angle, 2.0**-31)
    odd = [math.prod(range(k - 1, 0, -2)) for k in range(13)]
    for j in range(13):
        for k in range(13 - j):
            expected = 0.0 if j % 2 or k % 2 else odd[j] * odd[k] / math.prod(range(j + k, 0, -2))
            assert (u**j * angle**k).mean().item() == pytest.approx(expected, abs=1e-13)
