"""Sums of squares against a loop over examples in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.accelerator import scratch_bytes
from credo.kernels.convolution import Geometry
from credo.kernels.triton import sums

# Of sums of products of standard normals, relative to the largest: float32 sums, and inputs that are exact.
TOLERANCE = 2e-6


def normals(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_sums(found: tuple[Tensor, Tensor], rows: list[Tensor]) -> None:
    assert found is not NotImplemented
    truth = torch.stack(rows).double()
    for actual, own in zip(found, (truth.sum(0), truth.square().sum(0)), strict=True):
        assert actual.dtype is torch.float32
        assert actual.shape == own.shape
        assert (actual.double() - own).abs().max() <= TOLERANCE * own.abs().max()


SEQUENCES = [  # M, T, I, O
    (1, 1, 1, 1),
    (3, 2, 5, 7),
    (5, 33, 16, 17),
    (4, 7, 65, 3),
    (2, 40, 70, 90),
    (9, 3, 4, 4),
]


@pytest.mark.parametrize("sizes", SEQUENCES, ids=str)
def test_linear_layers_on_sequences(sizes):
    examples, places, inputs, outputs = sizes
    x, g = normals(0, examples, places, inputs), normals(1, examples, places, outputs)
    assert_sums(sums.sequence_sums(x, g), [b.double().T @ a.double() for a, b in zip(x, g, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_half_precision_are_float32(dtype):
    """Products of such numbers are exact in float32, so is the tolerance that of float32; and squares may be large."""
    x, g = normals(0, 3, 20, 9, dtype=dtype) * 40, normals(1, 3, 20, 11, dtype=dtype) * 40
    rows = [b.double().T @ a.double() for a, b in zip(x, g, strict=True)]
    assert max(float(r.square().max()) for r in rows) > 65504
    assert_sums(sums.sequence_sums(x, g), rows)


@pytest.mark.parametrize("order", ["transposed", "strided", "repeated", "backwards in memory"])
def test_layouts_of_sequences(order):
    x, g = normals(0, 3, 4, 5), normals(1, 3, 4, 6)
    if order == "transposed":
        x, g = normals(0, 5, 4, 3).permute(2, 1, 0), normals(1, 4, 3, 6).transpose(0, 1)
    elif order == "strided":
        x, g = normals(0, 3, 8, 10)[:, ::2, ::2], normals(1, 6, 4, 6)[::2]
    elif order == "repeated":
        x, g = normals(0, 3, 1, 5).expand(3, 4, 5), normals(1, 1, 4, 6).expand(3, 4, 6)
    else:
        x = normals(0, 4, 3, 5).transpose(0, 1)
    assert_sums(sums.sequence_sums(x, g), [b.double().T @ a.double() for a, b in zip(x, g, strict=True)])


# M, C, size, O, kernel, stride, padding, dilation, groups
CONVOLUTIONS = [
    (3, 2, (5, 6), 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 3, (7, 5), 5, (3, 2), (2, 1), (1, 0), (1, 2), 1),
    (3, 4, (6, 6), 6, (3, 3), (1, 1), (0, 2), (1, 1), 2),
    (2, 6, (5, 5), 6, (3, 3), (2, 2), (1, 1), (1, 1), 6),
    (2, 3, (4, 4), 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 3, (6, 6), 5, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (3, 2, (4, 4), 3, (4, 4), (1, 1), (0, 0), (1, 1), 1),
    (2, 9, (5, 5), 66, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (1, 1, (1, 1), 1, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 2, (3, 3), 2, (3, 3), (1, 1), (3, 3), (1, 1), 1),
    (3, 3, (9,), 4, (3,), (2,), (1,), (1,), 1),
    (2, 4, (8,), 6, (2,), (1,), (0,), (3,), 2),
]


def rows(x: Tensor, g: Tensor, at: Geometry) -> list[Tensor]:
    """Each example's own gradient, from autograd."""
    convolve = F.conv2d if x.dim() == 4 else F.conv1d
    found = []
    for own_x, own_g in zip(x.double().split(1), g.double().split(1), strict=True):
        weight = torch.zeros(g.shape[1], x.shape[1] // at.groups, *at.kernel_size, dtype=torch.float64)
        weight.requires_grad_()
        out = convolve(own_x, weight, None, at.stride, at.padding, at.dilation, at.groups)
        found.append(torch.autograd.grad(out, weight, own_g)[0])
    return found


def problem(case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Geometry]:
    examples, inputs, size, outputs, *geometry = case
    at = Geometry(*geometry)
    places = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, at.kernel_size, at.stride, at.padding, at.dilation, strict=True)
    ]
    return (
        normals(0, examples, inputs, *size, dtype=dtype),
        normals(1, examples, outputs, *places, dtype=dtype),
        at,
    )


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case):
    x, g, at = problem(case)
    assert_sums(sums.convolution_sums(x, g, at), rows(x, g, at))


@pytest.mark.parametrize("case", CONVOLUTIONS[1:4], ids=str)
def test_convolutions_channels_last(case):
    x, g, at = problem(case)
    expected = rows(x, g, at)
    x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    assert_sums(sums.convolution_sums(x, g, at), expected)
    assert_sums(sums.convolution_sums(x, g.contiguous(), at), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_convolutions_in_half_precision(dtype):
    x, g, at = problem(CONVOLUTIONS[1], dtype)
    assert_sums(sums.convolution_sums(x, g, at), rows(x, g, at))


def test_inputs_with_gaps_and_repetitions():
    x, g, at = problem(CONVOLUTIONS[0])
    wide = normals(0, 3, 2, 10, 12)[:, :, ::2, ::2]
    assert_sums(sums.convolution_sums(wide, g, at), rows(wide, g, at))
    same = x[:1].expand(3, 2, 5, 6)
    assert_sums(
        sums.convolution_sums(same, g.transpose(2, 3).contiguous().transpose(2, 3), at), rows(same, g, at)
    )


@pytest.mark.parametrize("programs", [1, 2, 3, 512])
def test_examples_are_shared_out_in_any_way(programs, monkeypatch):
    monkeypatch.setattr(sums, "PROGRAMS", programs)
    x, g = normals(0, 5, 3, 5), normals(1, 5, 3, 7)
    assert_sums(sums.sequence_sums(x, g), [b.double().T @ a.double() for a, b in zip(x, g, strict=True)])
    x, g, at = problem((5, 2, (4, 4), 4, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    assert_sums(sums.convolution_sums(x, g, at), rows(x, g, at))


def test_memory_of_the_shares_is_bounded():
    for examples in (1, 7, 128, 4096):
        for tiles, weights in ((1, 256), (8, 32768), (576, 2359296), (10**6, 10**9)):
            per, shares = sums._shares(examples, tiles, weights)
            assert per * shares >= examples > per * (shares - 1)
            assert shares == 1 or 8 * weights * shares <= scratch_bytes()
            assert tiles * shares < 2 * sums.PROGRAMS or shares == 1


def test_the_same_inputs_give_the_same_bits():
    x, g, at = problem(CONVOLUTIONS[0])
    first, second = sums.convolution_sums(x, g, at), sums.convolution_sums(x.clone(), g.clone(), at)
    assert all(map(torch.equal, first, second))


def test_infinite_numbers_stay_where_they_are():
    x, g, at = problem(CONVOLUTIONS[0])
    g[1, 2, 0, 0] = math.inf
    found = sums.convolution_sums(x, g, at)
    assert not found[0][2].isfinite().all()
    assert found[0][[0, 1, 3]].isfinite().all()


def test_a_convolution_with_one_place_is_a_linear_layer():
    x, g = normals(0, 3, 4, 5), normals(1, 3, 4, 6)
    found = sums.convolution_sums(x.mT, g.mT, Geometry((1,), (1,), (0,), (1,), 1))
    assert all(map(torch.equal, found, (own.unsqueeze(2) for own in sums.sequence_sums(x, g))))


def test_what_they_are_not_for():
    assert sums.sequence_sums(torch.ones(2, 3, 4).double(), torch.ones(2, 3, 5).double()) is NotImplemented
    assert sums.sequence_sums(torch.ones(2, 3, 4), torch.ones(2, 3, 5).half()) is NotImplemented
    assert sums.sequence_sums(torch.ones(0, 3, 4), torch.ones(0, 3, 5)) is NotImplemented
    at = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    assert sums.convolution_sums(torch.ones(2, 3, 4, 4, 4), torch.ones(2, 5, 4, 4, 4), at) is NotImplemented
