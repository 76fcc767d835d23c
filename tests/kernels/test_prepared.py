"""Plans are found by the kind of tensors, the kernels and the threads; what has none is known too."""

import pytest
import torch

from credo.kernels import native, prepared
from credo.kernels.convolution import weight_sums
from credo.kernels.normalisation import batch_norm_backward
from credo.kernels.prepared import Prepared


@pytest.fixture
def made():
    return []


@pytest.fixture
def numbered(made):
    def make(name):
        made.append(name)
        return None if name == "none" else len(made)

    return Prepared(make)


def test_a_plan_is_made_once_a_kind(numbered, made):
    assert [numbered.get(kind, kind) for kind in ("a", "b", "a", "none", "none")] == [1, 2, 1, None, None]
    assert made == ["a", "b", "none"]


def test_other_kernels_and_other_threads_have_other_plans(numbered):
    first, threads = numbered.get("a", "a"), torch.get_num_threads()
    with native.forced("off"):
        assert numbered.get("a", "a") != first
    try:
        torch.set_num_threads(threads + 1)
        assert numbered.get("a", "a") != first
    finally:
        torch.set_num_threads(threads)
    assert numbered.get("a", "a") == first


def test_there_are_not_more_and_more_of_them(numbered, monkeypatch):
    monkeypatch.setattr(prepared, "LIMIT", 3)
    for kind in range(10):
        numbered.get(kind, kind)
    assert len(numbered.known) <= 3


LAYOUTS = [torch.contiguous_format, torch.channels_last]


def reference(x, g):
    """Σᵢ rᵢ and Σᵢ rᵢ² of a 3×3 convolution, by autograd, an example at a time."""
    shares = []
    for one_x, one_g in zip(x, g, strict=True):
        weight = torch.zeros(4, 3, 3, 3, dtype=x.dtype, requires_grad=True)
        out = torch.conv2d(one_x[None], weight, padding=1)
        shares.append(torch.autograd.grad(out, weight, one_g[None])[0])
    return torch.stack(shares).sum(0), torch.stack(shares).square().sum(0)


def test_tensors_of_one_shape_and_several_layouts():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=source)
    g = torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=source)
    expected = reference(x, g)
    for of_x in LAYOUTS:
        for of_g in LAYOUTS:
            actual = weight_sums(
                x.contiguous(memory_format=of_x),
                g.contiguous(memory_format=of_g),
                (3, 3),
                (1, 1),
                (1, 1),
                (1, 1),
                1,
            )
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_batch_norm_of_one_shape_in_several_layouts_and_modes():
    source = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, 4, 5, 5, dtype=torch.float64, generator=source) for _ in range(2))
    weight, mean, invstd = (torch.rand(4, dtype=torch.float64, generator=source) for _ in range(3))
    for training in (True, False):
        with native.forced("off"):
            expected = batch_norm_backward(x, g, weight, mean, invstd, training, True)
        for of_x in LAYOUTS:
            for of_g in LAYOUTS:
                given = x.contiguous(memory_format=of_x), g.contiguous(memory_format=of_g)
                actual = batch_norm_backward(*given, weight, mean, invstd, training, True)
                if (
                    not training
                ):  # under training the reference asks torch, which wants the statistics of x itself
                    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-10, atol=1e-10)
