"""BatchNorm backward and its per-example sums against autograd and the definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import credo
from credo.kernels import forced, native
from credo.kernels.normalisation import batch_norm, batch_norm_backward
from tests.kernels.modes import MODES, assert_close, every_mode, every_type

EPS = 1e-5
SHAPES = [
    (4, 3, 5, 5),
    (7, 16, 8, 8),
    (5, 70, 3, 3),
    (6, 33),
    (3, 20, 9),
    (2, 5, 3, 4, 5),
    (4, 64, 1, 1),
    (40, 1, 2),
]


def operands(
    shape: tuple[int, ...], affine: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    weight = torch.randn(shape[1], dtype=torch.float64, generator=generator)
    weight[0] = 0
    return (x + 2).to(dtype), g.to(dtype), weight.to(dtype) if affine else None


def statistics(x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.full((x.shape[1],), 1.5, dtype=x.dtype), torch.full((x.shape[1],), 0.7, dtype=x.dtype)
    wide = x.double().transpose(0, 1).flatten(1)
    return wide.mean(1).to(x.dtype), (wide.var(1, unbiased=False) + EPS).rsqrt().to(x.dtype)


def oracle(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool
) -> list[Tensor]:
    """The input's gradient from autograd; the sums from copies of the affine parameters, one an example."""
    x, g, mean, invstd = (t.double() for t in (x, g, mean, invstd))
    weight = None if weight is None else weight.double()
    leaf = x.clone().requires_grad_()
    running = (None, None) if training else (mean, invstd**-2 - EPS)
    F.batch_norm(leaf, *running, weight, None, training, 0.1, EPS).backward(g)
    along = (1, -1, *[1] * (x.dim() - 2))
    normed = (x - mean.view(along)) * invstd.view(along)
    a, b = ((t.flatten(2).sum(2) if t.dim() > 2 else t) for t in (normed * g, g))
    assert leaf.grad is not None
    return [leaf.grad, a.sum(0), a.square().sum(0), b.sum(0), b.square().sum(0)]


def check(x: Tensor, g: Tensor, weight: Tensor | None, training: bool, mode: str) -> None:
    """gx is a difference of terms as large as weight·invstd·g."""
    mean, invstd = statistics(x, training)
    truths = oracle(x, g, weight, mean, invstd, training)
    with forced(mode):
        actual = batch_norm_backward(x, g, weight, mean, invstd, training, True)
        without_input = batch_norm_backward(x, g, weight, mean, invstd, training, False)
    for own, truth, scale in zip(actual, truths, (g * invstd.max(), *[None] * 4), strict=True):
        assert own is not None
        assert_close(own, truth, scale)
    assert without_input[0] is None
    for own, truth in zip(without_input[1:], truths[1:], strict=True):
        assert own is not None
        assert_close(own, truth)


@every_mode
@every_type
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], affine: bool, training: bool, dtype: torch.dtype, mode: str) -> None:
    check(*operands(shape, affine, dtype), training, mode)


@every_mode
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) == 4], ids=str)
def test_layouts(shape: tuple[int, ...], training: bool, mode: str) -> None:
    x, g, weight = operands(shape, True, torch.float64)
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x, g)]
    check(*last, weight, training, mode)
    check(last[0], g, weight, training, mode)
    check(x, last[1], weight, training, mode)
    check(x.transpose(2, 3), g[:, :, :, :1].expand_as(g), weight, training, mode)


@pytest.mark.parametrize("mode", MODES)
@given(sizes=st.tuples(st.integers(2, 40), st.integers(1, 70), st.integers(1, 20)), last=st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_size(mode: str, sizes: tuple[int, ...], last: bool) -> None:
    x, g, weight = operands(sizes, True, torch.float64)
    if last:
        x, g = (t.mT.contiguous().mT for t in (x, g))
    check(x, g, weight, True, mode)


@every_mode
def test_input_gradient_has_the_type_and_layout_of_the_input(mode: str) -> None:
    x, g, weight = operands((4, 6, 5, 5), True, torch.float32)
    x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with forced(mode):
        gx, *sums = batch_norm_backward(
            x, g.to(torch.bfloat16), weight, *statistics(x.float(), True), True, True
        )
    assert gx is not None
    assert gx.dtype == torch.bfloat16
    assert gx.is_contiguous(memory_format=torch.channels_last)
    assert all(s.dtype == torch.float32 for s in sums)


@every_mode
def test_no_examples(mode: str) -> None:
    nothing = torch.zeros(0, 3, 4, 4)
    with forced(mode):
        gx, *sums = batch_norm_backward(nothing, nothing, None, torch.zeros(3), torch.ones(3), False, True)
    assert gx is not None
    assert gx.shape == nothing.shape
    assert all(torch.equal(s, torch.zeros(3)) for s in sums)


@pytest.mark.parametrize("mode", native.available())
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_threads_do_not_change_a_bit(memory_format: torch.memory_format, mode: str) -> None:
    x, g, weight = operands((21, 24, 6, 6), True, torch.float32)
    x, g = (t.contiguous(memory_format=memory_format) for t in (x, g))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with forced(mode):
                results.append(batch_norm_backward(x, g, weight, *statistics(x, True), True, True))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(own, first) for own, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_forward_is_torchs_own(training: bool, affine: bool, layout: torch.memory_format, dtype: torch.dtype):
    """Bit by bit, running statistics too, of an output that is large enough to have memory of its own kind."""
    x = operands((32, 16, 32, 32), affine, dtype)[0].contiguous(memory_format=layout)
    weight, bias = (torch.randn(16, dtype=dtype), torch.randn(16, dtype=dtype)) if affine else (None, None)
    found, expected = [[torch.zeros(16, dtype=dtype), torch.ones(16, dtype=dtype)] for _ in range(2)]
    found += batch_norm(x, (weight, bias), tuple(found), training, 0.1, EPS)
    expected += torch.native_batch_norm(x, weight, bias, *expected, training, 0.1, EPS)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


GAPPY = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "half of the channels": lambda x: torch.cat((x, x), 1)[:, ::2],
    "every other place": lambda x: torch.stack((x, x), -1)[..., 0],
    "expanded": lambda x: x[:, :, :1].expand_as(x),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 6, 5), (64, 16, 512), (32, 16, 32, 32), (4, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("layout", GAPPY.values(), ids=GAPPY)
@pytest.mark.parametrize("running", [True, False])
def test_forward_of_any_layout_is_torchs_own(running, layout, shape, dtype):
    """What `out=` would leave unwritten has held something else before."""
    x = layout(operands(shape, True, dtype)[0])
    statistics = [[torch.zeros(x.shape[1]).to(dtype), torch.ones(x.shape[1]).to(dtype)] for _ in range(2)]
    found, expected = statistics if running else ([None, None], [None, None])
    poison = [torch.full((x.shape[1],), 7.0, dtype=dtype) for _ in range(50)]
    del poison
    found = [*found, *batch_norm(x, (None, None), tuple(found), True, 0.1, EPS)]
    expected = [*expected, *torch.native_batch_norm(x, None, None, *expected, True, 0.1, EPS)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or (
            torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        )


def test_a_change_in_place_of_the_output_is_allowed():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(inplace=True)
    )
    with credo.capture(model) as stats:
        model(torch.randn(32, 3, 34, 34)).square().mean().backward()
    assert len(stats.squares) == 4
