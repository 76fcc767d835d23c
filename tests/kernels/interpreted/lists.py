"""Lists of tensors in one launch: the numbers of the C++ kernels and of the functions beside the algorithms."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from credo.kernels import forced, noise, philox, update
from credo.kernels.native import available
from credo.kernels.triton import lists
from credo.kernels.triton.launching import launch
from credo.kernels.triton.tables import on_device
from credo.optim.ivon import ivon_update
from credo.optim.scales import averaged
from credo.optim.vogn import averaged_update

SEED, STREAM = 2**64 - 12345, 2**63 + 678  # the upper halves matter too
SIZES = [70, 0, 1100, 1]  # 1024 elements are a block
INDICES = [3, 4, 2**32 - 1, 0]
TYPES = [torch.float32, torch.float64]
# In float32 as exact as one rounding of a number of size 5; the logarithm of float64 is the library's.
EXACT = {torch.float32: 5e-7, torch.float64: 1e-14}


def row(seed: int, dtype: torch.dtype, low: float = -1.0, sizes: list[int] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, generator=generator, dtype=dtype) * (1 - low) + low for n in sizes]


def largest(a: list[Tensor], b: list[Tensor]) -> float:
    return max((float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)


@pytest.mark.parametrize(
    ("seed", "stream", "index"), [(0, 0, 0), (SEED, STREAM, 2**32 - 1), (1, 2**64 - 1, 5)]
)
def test_words_are_those_of_the_other_kernels_bit_for_bit(seed, stream, index):
    count = 96
    out = torch.empty(4 * count, dtype=torch.int64)
    signed = index - (index >> 31 << 32)
    assert launch("lists.words", (1,), out, signed, *lists.key(seed, stream), count, SIZE=128)
    blocks = torch.arange(count)
    expected = philox.words(blocks, torch.full_like(blocks, index), seed, stream)
    assert torch.equal(out.view(count, 4), torch.stack(expected, 1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_noise_is_that_of_the_other_kernels(dtype):
    weights, ones = row(0, dtype), [torch.ones(n, dtype=dtype) for n in SIZES]
    zeros, expected = [torch.zeros(n, dtype=dtype) for n in SIZES], row(1, dtype)
    lists.sample(weights, zeros, ones, [1.0] * len(SIZES), [0.0] * len(SIZES), SEED, STREAM, INDICES)
    for mode in ("off", *available()[-1:]):
        with forced(mode):
            noise.normal_all_(expected, SEED, STREAM, INDICES, [0] * len(SIZES))
        assert largest(weights, expected) < EXACT[dtype]


@pytest.mark.parametrize(
    ("shifted", "moved", "in_place", "dtype"),
    [(*form, torch.float32) for form in product([False, True], repeat=3)]
    + [(False, False, False, torch.float64), (True, True, True, torch.float64)],
)
def test_samples_are_means_and_normals(shifted, moved, in_place, dtype):
    means, curvatures, offsets = (row(k, dtype, low=0.1 * (k == 1)) for k in range(3))
    shifts, numbers = row(5, dtype, low=0.2), [0.3 * k for k in range(1, len(SIZES) + 1)]
    scales = [0.1 * k for k in range(1, len(SIZES) + 1)]
    before = [mean.clone() for mean in means]
    weights = means if in_place else row(3, dtype)
    versions = [weight._version for weight in weights]
    lists.sample(
        weights, means, curvatures, scales, shifts if shifted else numbers, SEED, STREAM, INDICES,
        offsets if moved else None,
    )  # fmt: skip
    epsilon = row(7, dtype)
    with forced("off"):
        noise.normal_all_(epsilon, SEED, STREAM, INDICES, [0] * len(SIZES))
    for k, weight in enumerate(weights):
        precision = curvatures[k] + (shifts[k] if shifted else numbers[k])
        own = before[k] + (offsets[k] if moved else 0) + epsilon[k] * (scales[k] / precision).sqrt()
        assert largest([weight], [own]) < 4 * EXACT[dtype]
        assert in_place or torch.equal(means[k], before[k])
        assert weight._version > versions[k]


def test_outputs_are_perturbed():
    mean, variance = row(0, torch.float64)[2].view(100, 11), row(1, torch.float64, 0.0)[2].view(100, 11)
    variance[3] = 0.0
    before, sd, epsilon = mean.clone(), (variance + 1e-30).sqrt(), torch.empty_like(mean)
    noise.normal_(epsilon, SEED, STREAM, 7)
    lists.perturb(mean, variance, SEED, STREAM, 7, 1e-30)
    assert (mean - before - sd * epsilon).abs().max() < 1e-14
    assert ((variance * 2 * sd - epsilon).abs() <= 1e-14 * epsilon.abs()).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, None])
def test_the_flag_says_whether_all_is_finite(value):
    tensors = row(0, torch.float32) + row(1, torch.float64)
    if value is not None:
        tensors[2][1099] = value
    flag = lists.all_finite(tensors)
    assert flag.dtype is torch.bool
    assert flag.shape == ()
    assert bool(flag) == (value is None or math.isfinite(value))


LR = [0.1 * k for k in range(1, 5)]
DAMPING = [0.01 * k for k in range(4)]


FORMS = list(product([False, True], repeat=4))
ALL = (True, True, True, True)


@pytest.mark.parametrize(
    ("priors", "prior_means", "away", "averages", "dtype", "refused"),
    [(*form, torch.float32, None) for form in FORMS]
    + [(*form, torch.float64, refused) for form in (FORMS[0], ALL) for refused in (None, False, True)]
    + [
        (False, False, away, averages, torch.float32, True)
        for away, averages in product([False, True], repeat=2)
    ],
)
def test_vogn(priors, prior_means, away, averages, dtype, refused):
    state = [row(k, dtype, low=0.1 * (k == 2)) for k in range(3)]
    gradients, squares, places, offsets = row(3, dtype), row(4, dtype, 0.0), row(5, dtype), row(6, dtype)
    of_prior, prior = row(7, dtype, 0.2), row(8, dtype)
    expected = [[t.double().clone() for t in own] for own in (*state, offsets)]
    origin = [t.double().clone() for t in (places if away else state[0])]
    flag = None if refused is None else torch.tensor(not refused)
    lists.vogn(
        *state, gradients, squares, of_prior if priors else 0.4, prior if prior_means else None,
        update.VOGNNumbers(LR, 0.9, 0.2, DAMPING, 0.5, 2.0, 0.3), offsets if averages else None,
        places if away else None, flag,
    )  # fmt: skip
    for k in range(len(SIZES)):
        own = averaged_update(
            origin[k], expected[1][k], expected[2][k], gradients[k].double() * 0.5, squares[k].double() * 2.0,
            expected[3][k] if averages else None, lr=LR[k], beta1=0.9, beta2=0.2,
            damping=DAMPING[k], prior=of_prior[k].double() if priors else 0.4,
            prior_mean=prior[k].double() if prior_means else None, weight=0.3,
        )  # fmt: skip
        if refused:
            own = origin[k], expected[1][k], expected[2][k], expected[3][k]
        for actual, truth in zip((*state, offsets), own, strict=True):
            if truth is not None and truth.numel():
                assert (actual[k].double() - truth).abs().max() < 8 * EXACT[dtype] * truth.abs().max()
            elif truth is None:
                assert torch.equal(actual[k].double(), expected[3][k])


@pytest.mark.parametrize(("priors", "prior_means", "averages"), list(product([False, True], repeat=3)))
@pytest.mark.parametrize(
    ("dtype", "radius", "refused"),
    [(torch.float32, 0.5, None), (torch.float64, math.inf, False), (torch.float64, 0.5, True)],
)
def test_ivon(dtype, priors, prior_means, averages, radius, refused):
    state = [row(k, dtype, low=0.1 * (k == 2)) for k in range(3)]
    gradients, products, of_prior, prior = row(3, dtype), row(4, dtype), row(7, dtype, 0.2), row(8, dtype)
    offsets = row(6, dtype)
    expected = [[t.double().clone() for t in own] for own in (*state, offsets)]
    numbers = update.IVONNumbers(LR, 0.9, 0.7, 2.0, radius, 0.5, [3.0 * k for k in range(4)])
    lists.ivon(
        *state, gradients, products, of_prior if priors else 0.4, prior if prior_means else None, numbers,
        offsets if averages else None, None if refused is None else torch.tensor(not refused), 0.3,
    )  # fmt: skip
    for k in range(len(SIZES)):
        mean, momentum, curvature, offset = (rows[k] for rows in expected)
        own = ivon_update(
            mean + offset if averages else mean, momentum, curvature, gradients[k].double() * 0.5,
            products[k].double() * 3.0 * k, lr=LR[k], beta1=0.9, beta2=0.7, correction=2.0, radius=radius,
            prior=of_prior[k].double() if priors else 0.4, prior_mean=prior[k].double() if prior_means else None,
        )  # fmt: skip
        own = (*(averaged(mean, own[0], 0.3) if averages else (own[0], offset)), *own[1:])
        if refused:
            own = mean, offset, momentum, curvature
        for actual, truth in zip((state[0], offsets, state[1], state[2]), own, strict=True):
            if truth.numel():
                assert (actual[k].double() - truth).abs().max() < 20 * EXACT[dtype] * truth.abs().max()


def test_the_curvature_of_ivon_stays_finite():
    state = [torch.ones(3), torch.ones(3), torch.full((3,), 1e20)]
    numbers = update.IVONNumbers(0.1, 0.9, 0.0, 1.0, 1.0, 1.0, 1e30)
    ones = [torch.ones(3)]
    lists.ivon(*([own] for own in state), ones, ones, 1.0, None, numbers, None, None)
    assert (state[2] == 1e30).all()


@pytest.mark.parametrize("add", [False, True])
def test_on_the_way_back_products_are_taken(add):
    weights, means, products, gradients = (row(k, torch.float64) for k in range(4))
    expected = [
        g * (w - m) + (p if add else 0)
        for w, m, p, g in zip(weights, means, products, gradients, strict=True)
    ]
    lists.restore(weights, means, products, gradients, add)
    assert largest(products, expected) < 1e-15
    assert all(map(torch.equal, weights, means))


def test_layouts_that_are_alike_are_taken_and_others_are_not():
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    others = [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(3)]
    expected = others[2] * (image - others[0])
    lists.restore([image], [others[0]], [others[1]], [others[2]], False)
    assert torch.equal(others[1], expected)
    for wrong in (
        torch.rand(2, 3, 4, 5),
        torch.rand(2, 3, 4, 10)[..., ::2],
        others[0].double(),
        others[0].half(),
    ):
        before = image.clone()
        assert lists.restore([image], [wrong], [others[1]], [others[2]], False) is NotImplemented
        assert torch.equal(image, before)


def test_tables_that_were_seen_are_not_made_again():
    cpu = torch.device("cpu")
    first = on_device((1.0, 2.0), cpu, torch.float64)
    assert on_device((1.0, 2.0), cpu, torch.float64) is first
    assert on_device((1.0, 2.0), cpu, torch.int64) is not first
    for k in range(1000):
        on_device((float(k),), cpu, torch.float64)
    assert torch.equal(on_device((1.0, 2.0), cpu, torch.float64), first)
