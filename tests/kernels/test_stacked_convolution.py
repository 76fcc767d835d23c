"""Convolutions with a weight for each slice, and their input's gradient, against one slice after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from credo.kernels import forced, native
from credo.kernels.stacked_convolution import Flat, stacked
from tests.kernels.modes import assert_close, every_mode, every_type


class Case(NamedTuple):
    examples: int
    slices: int
    channels: int
    size: Sequence[int]
    outputs: int
    kernel: Sequence[int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def flat(self) -> Flat:
        return Flat(self.stride, self.padding, self.dilation, self.groups)

    def options(self) -> tuple:
        last = slice(2 - len(self.kernel), None)
        return self.stride[last], self.padding[last], self.dilation[last], self.groups


CASES = {
    "lenet, first layer": Case(8, 4, 3, (12, 33), 6, (5, 5)),
    "lenet, second layer": Case(8, 4, 6, (14, 14), 16, (5, 5)),
    "one slice": Case(3, 1, 3, (6, 6), 4, (3, 3)),
    "unequal slices": Case(7, 3, 3, (6, 6), 4, (3, 3)),
    "more slices than examples": Case(3, 5, 3, (6, 6), 4, (3, 3)),
    "one example": Case(1, 1, 2, (5, 5), 3, (3, 3)),
    "padding": Case(4, 2, 5, (7, 9), 9, (3, 3), padding=(1, 2)),
    "padding beyond the kernel": Case(4, 2, 2, (4, 5), 3, (2, 3), padding=(3, 4)),
    "stride": Case(4, 2, 4, (9, 11), 8, (3, 3), (2, 2), (1, 1)),
    "unequal in every way": Case(5, 2, 4, (11, 21), 6, (3, 2), (2, 3), (2, 0), (2, 4), 2),
    "stride that leaves columns out": Case(4, 2, 2, (8, 10), 3, (1, 1), (3, 4)),
    "taps apart": Case(4, 2, 2, (11, 19), 3, (3, 3), dilation=(2, 3)),
    "depthwise": Case(4, 2, 5, (6, 6), 5, (3, 3), padding=(1, 1), groups=5),
    "depthwise, two outputs a channel": Case(4, 2, 5, (6, 6), 10, (3, 3), (2, 1), (1, 1), groups=5),
    "outputs of every tile": Case(2, 2, 2, (4, 4), 13, (2, 2)),
    "one place": Case(4, 2, 3, (3, 3), 5, (3, 3)),
    "whole vectors": Case(2, 2, 2, (3, 34), 3, (3, 3)),
    "one dimension": Case(5, 2, 3, (17,), 4, (3,), (1, 2), (0, 1)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
CONVOLUTIONS = (torch.conv1d, torch.conv2d)


def tensors(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    shapes = (
        (case.examples, case.channels, *case.size),
        (case.slices, case.outputs, case.channels // case.groups, *case.kernel),
        (case.slices, case.outputs),
    )
    x, weights, biases = (
        torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return x, weights, biases


def one_after_the_other(case: Case, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    convolution = CONVOLUTIONS[len(case.kernel) - 1]
    biases = [None] * case.slices if biases is None else biases
    parts = x.tensor_split(min(case.slices, len(x)))
    return torch.cat(
        [convolution(p, w, b, *case.options()) for p, w, b in zip(parts, weights, biases, strict=False)]
    )


def check(case: Case, dtype: torch.dtype) -> None:
    x, weights, biases = tensors(case, dtype)
    plan = stacked(x, weights, biases, case.flat)
    assert plan is not None
    exact = x.double().requires_grad_()
    truth = one_after_the_other(case, exact, weights.double(), biases.double())
    assert_close(plan(x, weights, biases), truth.detach())
    g = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    (gx,) = torch.autograd.grad(truth, exact, g.double())
    scale = torch.cat([gx.flatten(), g.double().flatten()])
    assert_close(plan.input_gradient(g, weights, x), gx, scale)
    assert_close(plan(x, weights, None), one_after_the_other(case, exact, weights.double(), None).detach())


@every_case
@every_mode
@every_type
def test_equals_one_slice_after_the_other(case, mode, dtype):
    with forced(mode):
        if mode == "off":
            assert stacked(*tensors(case, dtype), case.flat) is None
        else:
            check(case, dtype)


@st.composite
def cases(draw) -> Case:
    groups = draw(st.integers(1, 3))
    kernel, stride, dilation = (tuple(draw(st.integers(1, 3)) for _ in range(2)) for _ in range(3))
    padding = tuple(draw(st.integers(0, 4)) for _ in range(2))
    size = tuple(d * (k - 1) + 1 + draw(st.integers(0, 20)) for d, k in zip(dilation, kernel, strict=True))
    examples, slices, channels, outputs = (draw(st.integers(1, top)) for top in (6, 4, 4, 5))
    return Case(
        examples, slices, channels * groups, size, outputs * groups, kernel, stride, padding, dilation, groups
    )


@pytest.mark.skipif(not native.available(), reason="the kernels were not built")
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_any_geometry(case):
    check(case, torch.float64)


@pytest.mark.skipif(not native.available(), reason="the kernels were not built")
def test_the_number_of_threads_changes_no_bit():
    case, before = CASES["unequal slices"], torch.get_num_threads()
    x, weights, biases = tensors(case, torch.float32)
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            plan = stacked(x, weights, biases, case.flat)
            out = plan(x, weights, biases)
            results.append((out, plan.input_gradient(out, weights, x)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


UNSUITABLE = {
    "integers": lambda x, w, b: (x.int(), w.int(), b),
    "half precision": lambda x, w, b: (x.bfloat16(), w.bfloat16(), b),
    "two types": lambda x, w, b: (x.double(), w, b),
    "channels last": lambda x, w, b: (x.contiguous(memory_format=torch.channels_last), w, b),
    "weights with gaps": lambda x, w, b: (x, w.repeat(1, 2, 1, 1, 1)[:, ::2], b),
    "biases of another type": lambda x, w, b: (x, w, b.double()),
    "too few biases": lambda x, w, b: (x, w, b[:, 1:].contiguous()),
    "more channels than the weights have": lambda x, w, b: (x.repeat(1, 2, 1, 1), w, b),
    "fewer channels than the weights have": lambda x, w, b: (x[:, :2].contiguous(), w, b),
    "no examples": lambda x, w, b: (x[:0], w, b),
    "smaller than the kernel": lambda x, w, b: (x[..., :2].contiguous(), w, b),
    "three dimensions": lambda x, w, b: (x.unsqueeze(2), w.unsqueeze(3), b),
    "so much that torch is faster": lambda x, w, b: (
        x.repeat(400, 1, 9, 3),
        w.repeat(1, 9, 1, 1, 1),
        b.repeat(1, 9),
    ),
    "short rows": lambda x, w, b: (x.repeat(100, 8, 1, 1), w.repeat(1, 99, 8, 1, 1), b.repeat(1, 99)),
}


@pytest.mark.parametrize("change", UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_what_it_is_not_for(change):
    assert (
        stacked(*change(*tensors(CASES["unequal slices"], torch.float32)), CASES["unequal slices"].flat)
        is None
    )


@pytest.mark.parametrize(("name", "value"), [("padding", (0, -1)), ("stride", (1, 0)), ("dilation", (0, 1))])
def test_geometries_that_torch_refuses(name, value):
    case = CASES["unequal slices"]
    assert stacked(*tensors(case, torch.float32), case.flat._replace(**{name: value})) is None
