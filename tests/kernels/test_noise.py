"""The noise: the published generator, the same numbers everywhere, and the distribution they should have."""

import ctypes
import hashlib
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from credo.errors import InvalidValue
from credo.kernels import forced, noise, philox, tensors
from credo.kernels.native import available, integers, symbol

DTYPES = [torch.float32, torch.float64]
EVERYWHERE = ["off", *available()]
SEED, STREAM = 2**64 - 12345, 2**63 + 678  # the upper halves matter too

# Random123's known answers for Philox4x32 with 7 rounds: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def normals(
    count: int, seed: int = SEED, stream: int = STREAM, index: int = 0, dtype=torch.float32
) -> Tensor:
    out = torch.empty(count, dtype=dtype)
    noise.normal_(out, seed, stream, index)
    return out


def sampled(
    count: int, seed: int = SEED, stream: int = STREAM, index: int = 0, dtype=torch.float32
) -> Tensor:
    """The noise that samples are made with: those of N(0, 1)."""
    out = torch.zeros(count, dtype=dtype)
    noise.sample_(out, torch.zeros_like(out), 1.0, 1.0, seed, stream, index)
    return out


def words(where: str, block: int, index: int, seed: int, stream: int) -> list[int]:
    if where == "off":
        return [int(w) for w in philox.words(torch.tensor([block]), torch.tensor([index]), seed, stream)]
    out = (ctypes.c_uint32 * 4)()
    symbol("noise_words", where)(integers(seed, stream), ctypes.c_int64(index), ctypes.c_int64(block), out)
    return list(out)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_words_are_philox(where, counter, key, expected):
    x, y, z, w = (int(word, 16) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    assert words(where, x, y, high << 32 | low, w << 32 | z) == [int(word, 16) for word in expected.split()]


def plain_normal(position: int, seed: int, stream: int, index: int, dtype: torch.dtype) -> float:
    """One number, straight from the description, in Python's own arithmetic."""
    tile, place = divmod(position, 64)
    lane, second = place % 32, place >= 32
    if dtype == torch.float64:
        x, y, z, w = words("off", tile * 32 + lane, index, seed, stream)
        radius, angle, bits, shift, half = x | y << 32, z | w << 32, 53, 11, 1 << 52
    else:
        four = words("off", tile * 32 + lane // 2, index, seed, stream)
        radius, angle = four[2 * (lane % 2)], four[2 * (lane % 2) + 1]
        bits, shift, half = 31, 2, 1 << 29
    u = (radius >> (11 if bits == 53 else 1) | 1) / 2**bits
    theta = ((angle >> shift & 2 * half - 1 | 1) - half) / half * math.pi / 4
    length = math.sqrt(-2 * math.log(u)) * (-1 if angle & 1 else 1)
    return length * (math.sin(theta) if bool(angle & 2) != second else math.cos(theta))


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_are_those_of_the_description(where, dtype):
    with forced(where):
        drawn = normals(300, index=5, dtype=dtype)
    expected = [plain_normal(i, SEED, STREAM, 5, dtype) for i in range(300)]
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(
        drawn.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=0
    )


@pytest.mark.parametrize("where", available())
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_and_kernels_agree_to_the_last_bits(where, dtype):
    with forced("off"):
        reference = normals(300_001, dtype=dtype)
    with forced(where):
        native = normals(300_001, dtype=dtype)
    assert ((native - reference).abs() <= 4 * torch.finfo(dtype).eps * reference.abs()).all()


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_any_length_at_any_place_are_the_whole(where, dtype):
    with forced(where):
        whole, pieces = normals(5000, dtype=dtype), torch.empty(5000, dtype=dtype)
        cuts = [0, 1, 3, 64, 127, 129, 1000, 1001, 4998, 5000]
        for begin, end in pairwise(cuts):
            noise.normal_(pieces[begin:end], SEED, STREAM, start=begin)
    assert torch.equal(whole, pieces)


SIZES = [1, 64, 0, 100, 300_000, 63, 70_000]


def sampled_list(dtypes: list[torch.dtype], indices: list[int]) -> list[Tensor]:
    together = [torch.zeros(n, dtype=dtype) for n, dtype in zip(SIZES, dtypes, strict=True)]
    noise.sample_all_(together, [torch.zeros_like(t) for t in together], 1.0, 1.0, SEED, STREAM, indices)
    return together


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_list_of_samples_is_its_tensors_one_by_one(where):
    indices = [3, 0, 7, 2**32 - 1, 5, 6, 8]
    with forced(where):
        together = sampled_list([torch.float32] * len(SIZES), indices)
        for out, index in zip(together, indices, strict=True):
            assert torch.equal(out, sampled(out.numel(), index=index))


def plain_generator(seed: int, stream: int, index: int) -> torch.Generator:
    """A Mersenne twister, all of whose words come from the key, one after the other."""
    digest = hashlib.shake_128(struct.pack("<3Q", seed, stream, index)).digest(4 * 624)
    state = bytearray(torch.Generator().get_state().tolist())
    for k in range(624):
        state[24 + 8 * k : 32 + 8 * k] = digest[4 * k : 4 * k + 4] + bytes(4)
    return torch.Generator().set_state(torch.tensor(list(state), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [48, 1 << 19])
def test_without_kernels_the_noise_is_that_of_a_generator_of_the_key(dtype, part, monkeypatch):
    monkeypatch.setattr(noise, "PART", part)
    generator = plain_generator(SEED, STREAM, 7)
    parts = [torch.randn(min(part, 320), generator=generator, dtype=dtype) for _ in range(-(-320 // part))]
    whole = torch.cat(parts)
    for size in (1, 20, 48, 300):  # each place has its number, whatever the size
        with forced("off"):
            assert torch.equal(sampled(size, index=7, dtype=dtype), whole[:size])


def test_the_words_of_a_generator_are_where_its_key_is_written():
    """torch seeds by the low half of the seed only; all the words of the state follow from it by a known rule."""
    word, words = 12345, []
    for k in range(624):
        words.append(word)
        word = (1812433253 * (word ^ word >> 30) + k + 1) & 0xFFFFFFFF
    state = torch.Generator().manual_seed(12345).get_state()
    begin, end = noise.STATE_BEGIN, noise.STATE_BEGIN + 8 * noise.STATE_WORDS
    assert state[begin:end].view(torch.int64).tolist() == words


def test_another_default_device_does_not_matter():
    with forced("off"):
        weights = [torch.zeros(1001), torch.zeros(1001)]
        for weight, device in zip(weights, ("cpu", "meta"), strict=True):
            curvature = torch.zeros_like(weight)
            with torch.device(device):
                noise.sample_(weight, curvature, 1.0, 1.0, SEED, STREAM)
    assert torch.equal(*weights)
    assert weights[0].count_nonzero() == 1001


def test_python_threads_do_not_meet():
    def draws(seed: int) -> list[Tensor]:
        with forced("off"):
            return [sampled(50_000, seed, stream) for stream in range(5)]

    expected = [draw for seed in range(4) for draw in draws(seed)]
    with ThreadPoolExecutor(4) as pool:
        found = [draw for own in pool.map(draws, range(4)) for draw in own]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_draw_puts_the_means_by(both_kernels, dtype, shifted, strided):
    sizes = [(5,), (64,), (0,), (130, 3), (700, 500)]
    means = [
        torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(k))
        for k, size in enumerate(sizes)
    ]
    means = [mean.t().contiguous().t() if strided else mean for mean in means]
    shift = [torch.full_like(mean, 0.5) for mean in means] if shifted else 0.5
    ones, key = [torch.ones_like(mean) for mean in means], (SEED, STREAM, [4, 0, 1, 2, 3])
    plain, backup = (
        [mean.clone() for mean in means],
        tensors.Backup([torch.full_like(mean, torch.nan) for mean in means]),
    )
    drawn = [mean.clone() for mean in means]
    noise.sample_all_(plain, ones, 0.1, shift, *key)
    assert backup.done.value == 0
    noise.sample_all_(drawn, ones, 0.1, shift, *key, None, backup)
    assert backup.done.value == 1
    assert all(torch.equal(one, other) for one, other in zip(backup.places, means, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(drawn, plain, strict=True))


def test_keys_with_the_same_32_bit_seed_share_no_noise():
    """Any bit of any part of the key changes everything, also those that torch's seeds leave out."""
    with forced("off"):
        drawn = [sampled(1000)]
        drawn += [sampled(1000, seed=SEED ^ 1 << bit) for bit in (0, 31, 32, 63)]
        drawn += [sampled(1000, stream=STREAM ^ 1 << bit) for bit in (0, 31, 32, 63)]
        drawn += [sampled(1000, index=1 << bit) for bit in (0, 31)]
        drawn += [sampled(noise.PART + 1000)[noise.PART :]]
    every = torch.stack(drawn)
    assert every.unique().numel() > 0.999 * every.numel()  # float32 repeats a few by chance
    together = every.double() @ every.double().T / math.sqrt(1000)
    assert together.fill_diagonal_(0).abs().max() < 5


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(where, dtype):
    before, drawn = torch.get_num_threads(), []
    mean, curvature = torch.linspace(-1, 1, 200_003, dtype=dtype), torch.linspace(0, 2, 200_003, dtype=dtype)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with forced(where):
                weight = mean.clone()
                noise.sample_(weight, curvature, 0.1, 0.5, SEED, STREAM)
                drawn.append((normals(200_003, dtype=dtype), weight))
    finally:
        torch.set_num_threads(before)
    for normal, weight in drawn[1:]:
        assert torch.equal(normal, drawn[0][0])
        assert torch.equal(weight, drawn[0][1])


def test_a_list_is_its_tensors_one_by_one(both_kernels):
    sizes, indices = [1, 64, 0, 100, 300_000, 63], [3, 0, 7, 2**32 - 1, 5, 6]
    together = [torch.empty(size) for size in sizes]
    noise.normal_all_(together, SEED, STREAM, indices, [0] * len(sizes))
    for out, index in zip(together, indices, strict=True):
        assert torch.equal(out, normals(out.numel(), index=index))


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_is_mean_plus_noise_times_sigma(both_kernels, dtype, vector):
    generator = torch.Generator().manual_seed(0)
    mean, curvature, shifts = torch.rand(3, 1001, dtype=dtype, generator=generator)
    shift = shifts if vector else 0.25
    weight = mean.clone()
    noise.sample_(weight, curvature, 1e-2, shift, SEED, STREAM, 4)
    expected = mean + sampled(1001, index=4, dtype=dtype) * (1e-2 / (curvature + shift)).sqrt()
    torch.testing.assert_close(
        weight, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    other = torch.empty_like(mean)
    noise.sample_(other, curvature, 1e-2, shift, SEED, STREAM, 4, mean=mean)
    assert torch.equal(other, weight)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_are_exact_at_every_precision(where, dtype):
    """From the smallest normal number to almost the largest; beyond them, none and all of the noise."""
    limits = torch.finfo(dtype)
    precision = torch.logspace(
        math.log10(limits.tiny), math.log10(limits.max) - 0.1, 1000, dtype=torch.float64
    )
    precision = precision.to(dtype)
    with forced(where):
        unit, own = sampled(1000, dtype=dtype), torch.zeros(1000, dtype=dtype)
        noise.sample_(own, precision, 0.25, 0.0, SEED, STREAM)
        truth = unit.double() * (0.25 / precision.double()).sqrt()
        assert ((own.double() - truth).abs() <= 4 * limits.eps * truth.abs()).all()
        ends = torch.ones(2, dtype=dtype)
        noise.sample_(ends, torch.tensor([math.inf, 0.0], dtype=dtype), 0.25, 0.0, SEED, STREAM)
        assert ends[0] == 1
        assert ends[1].isinf()


def test_layouts_in_memory_do_not_mix_up_elements(both_kernels):
    mean, curvature = torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last), torch.rand(8, 6, 3, 3)
    weight = mean.clone()
    noise.sample_(weight, curvature, 1.0, 0.5, SEED, STREAM)
    aligned = mean.clone()
    noise.sample_(aligned, curvature.to(memory_format=torch.channels_last), 1.0, 0.5, SEED, STREAM)
    assert torch.equal(weight, aligned)
    strided = torch.zeros(20, 10)[:, ::2]  # has gaps
    noise.sample_(strided, torch.ones(20, 5), 2.0, 1.0, SEED, STREAM)
    torch.testing.assert_close(strided.flatten(), sampled(100))


def test_half_precision_weights_take_float32_noise(both_kernels):
    weight, curvature = torch.ones(500, dtype=torch.bfloat16), torch.rand(500)
    noise.sample_(weight, curvature, 0.1, 0.5, SEED, STREAM)
    with forced("off"):  # as for all tensors that the kernels do not take
        expected = 1 + sampled(500) * (0.1 / (curvature + 0.5)).sqrt()
    torch.testing.assert_close(weight, expected.bfloat16(), rtol=2**-7, atol=1e-3)


def test_autograd_sees_that_the_weight_changed(both_kernels):
    weight = torch.nn.Parameter(torch.ones(10))
    loss = (weight**2).sum()
    noise.sample_(weight, torch.ones(10), 1.0, 1.0, SEED, STREAM)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_global_generator_is_untouched(both_kernels):
    before = torch.get_rng_state()
    normals(1000), sampled(200_000)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "key", [(-1, 0, 0, 0), (2**64, 0, 0, 0), (0, -1, 0, 0), (0, 0, 2**32, 0), (0, 0, 0, 2**33)]
)
def test_keys_out_of_range_are_refused_and_nothing_is_changed(key):
    out = torch.ones(3)
    with pytest.raises(InvalidValue):
        noise.normal_(out, *key)
    assert torch.equal(out, torch.ones(3))
