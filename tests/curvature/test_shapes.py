"""Shapes, strides, groups and paddings by the hundred, against the loop."""

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import credo
from tests.curvature.oracle import mean_loss, relative_error, squares_by_loop, target_for

FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
small = st.integers(1, 4)


def check(model: nn.Module, x: torch.Tensor) -> None:
    model = model.double()
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    grads = torch.autograd.grad(mean_loss(model(x), target), list(model.parameters()))
    with credo.capture(model) as stats:
        mean_loss(model(x), target).backward()
    for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
        assert relative_error(stats.squares[parameter], truth[name]) < 1e-10, name
        assert relative_error(parameter.grad, grad) < 1e-11, name


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@FEW
@given(st.lists(small, min_size=1, max_size=3), small, small, st.booleans())
def test_linear(lead, inputs, outputs, bias):
    check(nn.Linear(inputs, outputs, bias=bias), normal(*lead, inputs))


@FEW
@given(
    dims=st.integers(1, 3),
    examples=small,
    groups=st.integers(1, 3),
    width=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 2), st.just("same")),
    mode=st.sampled_from(["zeros", "circular", "replicate"]),
    size=st.integers(7, 9),
    transposed=st.booleans(),
)
def test_convolution(
    dims, examples, groups, width, kernel, stride, dilation, padding, mode, size, transposed
):
    channels = (groups * width[0], groups * width[1])
    options = {"groups": groups, "dilation": dilation, "stride": stride}
    size = size if dims < 3 else 7
    if transposed:
        layer = getattr(nn, f"ConvTranspose{dims}d")(*channels, kernel, padding=0, **options)
    else:
        options["stride"] = 1 if padding == "same" else stride
        layer = getattr(nn, f"Conv{dims}d")(*channels, kernel, padding=padding, padding_mode=mode, **options)
    check(layer, normal(examples, channels[0], *[size] * dims))


@FEW
@given(
    small,
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(small, max_size=2),
    st.sampled_from(["group", "instance", "batch"]),
)
def test_channel_norms(examples, groups, each, space, kind):
    channels = groups * each
    space = space or [3]
    norm = {
        "group": lambda: nn.GroupNorm(groups, channels),
        "instance": lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(space) - 1](channels, affine=True),
        "batch": lambda: (nn.BatchNorm1d, nn.BatchNorm2d)[len(space) - 1](channels).eval(),
    }[kind]()
    assume(torch.Size(space).numel() > 1)  # torch refuses to normalise one number
    check(nn.Sequential(norm, nn.Tanh()), normal(examples, channels, *space))


@FEW
@given(st.lists(small, min_size=1, max_size=3), st.lists(small, min_size=1, max_size=2), st.booleans())
def test_row_norms(lead, shape, layer):
    assume(torch.Size(shape).numel() > 1)  # one number normalised is zero, and its gradient rounding
    norm = nn.LayerNorm(shape) if layer else nn.RMSNorm(shape)
    check(nn.Sequential(norm, nn.Tanh()), normal(*lead, *shape))


@FEW
@given(small, st.integers(0, 6), st.integers(1, 5), st.integers(1, 3), st.one_of(st.none(), st.just(0)))
def test_embedding(examples, positions, tokens, width, padding):
    shape = (examples, positions) if positions else (examples,)
    indices = torch.randint(0, tokens, shape, generator=torch.Generator().manual_seed(examples))
    check(nn.Embedding(tokens, width, padding_idx=padding), indices)
