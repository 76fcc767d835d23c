"""Σᵢrᵢ and Σᵢrᵢ² of a convolution's weight against a loop over examples."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from credo.kernels import forced, native, scratch
from credo.kernels.convolution import weight_sums
from credo.kernels.convolution_reference import Geometry, weight_sums_reference
from tests.kernels.modes import MODES, assert_close, every_mode, every_type

GRADIENTS = (torch.nn.grad.conv1d_weight, torch.nn.grad.conv2d_weight, torch.nn.grad.conv3d_weight)


class Case(NamedTuple):
    examples: int
    channels: int
    size: Sequence[int]
    outputs: int
    kernel: Sequence[int]
    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1


CASES = {
    "lenet, few channels": Case(3, 3, (12, 12), 6, (5, 5)),
    "one channel": Case(3, 1, (9, 9), 6, (5, 5)),
    "alexnet, a long stride": Case(2, 3, (32, 32), 40, (11, 11), 4, 5),
    "stride and padding": Case(4, 16, (9, 7), 32, (3, 3), 2, 1),
    "channels that fill no vector": Case(2, 70, (5, 5), 41, (3, 3), 1, 1),
    "two by two": Case(9, 35, (2, 2), 50, (3, 3), 1, 1),
    "two by two, large": Case(3, 128, (2, 2), 256, (3, 3), 1, 1),
    "four by four, large": Case(3, 96, (4, 4), 96, (3, 3), 1, 1),
    "eight by eight, large": Case(2, 96, (8, 8), 100, (3, 3), 1, 1),
    "eight by eight, in two chunks": Case(100, 32, (8, 8), 33, (3, 3), 1, 1),
    "forty by forty, in chunks": Case(5, 49, (40, 40), 48, (3, 3), 1, 1),
    "many taps": Case(3, 40, (9, 9), 50, (5, 5), 1, 2),
    "many taps, small images": Case(3, 50, (7, 7), 40, (5, 5), 1, 2),
    "one place": Case(5, 20, (3, 3), 8, (3, 3)),
    "one place, mostly padding": Case(5, 20, (1, 1), 8, (3, 3), 1, 1),
    "one place, dilated": Case(5, 4, (4, 5), 8, (3, 3), 1, 1, 2),
    "taps that see only padding": Case(3, 5, (2, 2), 4, (3, 3), 1, 4),
    "a tap in the middle that steps over the input": Case(3, 4, (1, 6), 5, (3, 3), 2, 2),
    "lines that step over the input": Case(2, 3, (2, 2), 4, (4, 4), 3, 3),
    "pointwise": Case(3, 20, (6, 5), 33, (1, 1)),
    "pointwise with a stride": Case(3, 20, (6, 5), 33, (1, 1), 2),
    "dilation": Case(3, 5, (11, 12), 7, (3, 2), 1, (2, 1), (2, 3)),
    "unequal in every way": Case(3, 8, (9, 5), 12, (3, 2), (1, 2), (1, 0), (2, 1), 4),
    "depthwise": Case(3, 20, (6, 6), 20, (3, 3), 1, 1, 1, 20),
    "depthwise, two outputs a channel": Case(3, 5, (6, 6), 10, (3, 3), 2, 1, 1, 5),
    "two large groups": Case(2, 128, (5, 5), 128, (3, 3), 1, 1, 1, 2),
    "many examples": Case(70, 3, (10, 10), 4, (3, 3)),
    "one dimension": Case(4, 6, (17,), 5, (4,), 2, 3),
    "one dimension, grouped": Case(4, 6, (17,), 9, (3,), 1, 0, 2, 3),
    "three dimensions": Case(2, 4, (5, 6, 4), 3, (2, 3, 2), (1, 2, 1), 1),
    "three dimensions, dilated": Case(2, 4, (6, 6, 7), 6, (2, 2, 3), 1, (0, 1, 1), (1, 2, 2), 2),
}


def spread(value: int | Sequence[int], dims: int) -> Sequence[int]:
    return (value,) * dims if isinstance(value, int) else value


def geometry(case: Case) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], int]:
    dims = len(case.size)
    return case.kernel, *(spread(v, dims) for v in (case.stride, case.padding, case.dilation)), case.groups


def operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernel, stride, padding, dilation, _ = geometry(case)
    places = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, k, t, p, d in zip(case.size, kernel, stride, padding, dilation, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.examples, case.channels, *case.size, dtype=torch.float64, generator=generator)
    g = torch.randn(case.examples, case.outputs, *places, dtype=torch.float64, generator=generator)
    return x.to(dtype), g.to(dtype)


def oracle(case: Case, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    kernel, *rest = geometry(case)
    shape = (case.outputs, case.channels // case.groups, *kernel)
    gradient = GRADIENTS[len(kernel) - 1]
    own = [gradient(x[i : i + 1].double(), shape, g[i : i + 1].double(), *rest) for i in range(len(x))]
    return sum(own, torch.zeros(shape).double()), sum((r.square() for r in own), torch.zeros(shape).double())


def check(case: Case, x: Tensor, g: Tensor, mode: str) -> None:
    with forced(mode):
        actual = weight_sums(x, g, *geometry(case))
    for own, truth in zip(actual, oracle(case, x, g), strict=True):
        assert_close(own, truth)


@every_mode
@every_type
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cases(case: Case, dtype: torch.dtype, mode: str) -> None:
    check(case, *operands(case, dtype), mode)


BYTES = (1, 5000, 1 << 19)  # of rᵢ: a part of one, several of small ones, many


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("threads", "size"), [(1, BYTES[0]), (2, BYTES[0]), (3, BYTES[1]), (2, BYTES[2])])
def test_the_reference_in_parts_of_any_size(
    case: Case, threads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("credo.kernels.convolution_reference.PRODUCTS", size)
    monkeypatch.setattr("credo.kernels.convolution_reference.COLUMNS", 16 * size)
    x, g = operands(case, torch.float64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        actual = weight_sums_reference(x, g, Geometry(*geometry(case)))
    finally:
        torch.set_num_threads(before)
    for own, truth in zip(actual, oracle(case, x, g), strict=True):
        assert_close(own, truth)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_reference_does_not_see_what_it_left_in_memory(case: Case) -> None:
    """Lines are filled up to a length that matrix products like, with whatever there is."""
    x, g = operands(case, torch.float64)
    with forced("off"):
        weight_sums(torch.full_like(x, torch.nan), torch.full_like(g, torch.nan), *geometry(case))
    check(case, x, g, "off")


@every_mode
@pytest.mark.parametrize("case", [c for c in CASES.values() if len(c.size) == 2], ids=str)
def test_channels_last(case: Case, mode: str) -> None:
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in operands(case, torch.float64))
    check(case, x, g, mode)
    check(case, x, g.contiguous(), mode)


@every_mode
def test_any_strides(mode: str) -> None:
    case = Case(4, 6, (7, 7), 20, (3, 3), 1, 1)
    x, g = operands(case, torch.float64)
    wide = torch.randn(4, 9, 7, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    check(case, wide[:, 2:8, :, ::2], g.transpose(2, 3), mode)
    check(case, x, g[:, :, :1, :1].expand_as(g), mode)
    check(case, wide[:, :6, :, :7], g, mode)


dimensions = st.integers(1, 3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims, groups = draw(dimensions), draw(st.sampled_from((1, 1, 2, 3)))
    numbers = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * dims))  # noqa: E731
    kernel, dilation, padding = numbers(1, 4), numbers(1, 2), numbers(0, 3)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = [n + draw(st.integers(0, 6)) for n in least]
    channels, outputs = groups * draw(st.integers(1, 20)), groups * draw(st.integers(1, 36))
    return Case(
        draw(st.integers(1, 5)), channels, size, outputs, kernel, numbers(1, 3), padding, dilation, groups
    )


@pytest.mark.parametrize("mode", MODES)
@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_any_geometry(mode: str, case: Case) -> None:
    for dtype in (torch.float64, torch.float32):
        check(case, *operands(case, dtype), mode)


@every_mode
def test_no_examples(mode: str) -> None:
    case = Case(0, 3, (5, 5), 4, (3, 3))
    check(case, *operands(case, torch.float32), mode)


@every_mode
def test_half_precision_is_summed_in_single(mode: str) -> None:
    case = CASES["stride and padding"]
    x, g = (t.to(torch.bfloat16) for t in operands(case, torch.float64))
    with forced(mode):
        total, squares = weight_sums(x, g, *geometry(case))
    assert total.dtype == squares.dtype == torch.float32
    check(case, x.float(), g.float(), mode)


@every_mode
def test_more_scratch_than_allowed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images are summed channels by channels, in less scratch memory than their copies would take."""
    monkeypatch.setattr("credo.kernels.convolution.LIMIT", 1 << 15)
    monkeypatch.setattr("credo.kernels.convolution_reference.COLUMNS", 1 << 15)
    for case in (Case(2, 9, (20, 20), 7, (3, 3), 1, 1), Case(2, 9, (20, 20), 6, (3, 3), 1, 1, 1, 3)):
        check(case, *operands(case, torch.float64), mode)


@pytest.mark.parametrize("mode", native.available())
@pytest.mark.parametrize("case", [CASES["many examples"], CASES["two by two, large"]], ids=str)
def test_threads_do_not_change_a_bit(case: Case, mode: str) -> None:
    x, g = operands(case, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with forced(mode):
                results.append(weight_sums(x, g, *geometry(case)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@every_mode
def test_two_python_threads_at_once(mode: str) -> None:
    work = [CASES["lenet, few channels"], CASES["four by four, large"]]
    failures: list[BaseException] = []

    def run(case: Case) -> None:
        try:
            for _ in range(10):
                check(case, *operands(case, torch.float64), mode)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(case,)) for case in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@every_mode
@pytest.mark.parametrize("groups", [1, 256])
def test_scratch_is_bounded(mode: str, groups: int) -> None:
    """What is kept after a large batch stays under the 32 MB that the engine may add."""
    shape = (64, 64, 32, 32) if groups == 1 else (2, groups, 64, 64)
    x, g = torch.ones(shape), torch.ones(shape)
    kept: list[int] = []

    def run() -> None:  # in a thread of its own, for scratch memory of its own
        with forced(mode):
            weight_sums(x, g, (3, 3), (1, 1), (1, 1), (1, 1), groups)
        kept.append(sum(b.numel() * b.element_size() for b in scratch._kept.buffers.values()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert kept[0] <= 32 << 20
