"""Kronecker factors against loops over examples and positions."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from tests.curvature.oracle import mean_loss, target_for


def seeded(build) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_vector(layer: nn.Module, grads: dict[Tensor, Tensor]) -> Tensor:
    """vec([∇W ∇b]), column-stacked."""
    columns = [grads[layer.weight].flatten(1)]
    if layer.bias is not None:
        columns.append(grads[layer.bias].unsqueeze(1))
    return torch.cat(columns, 1).T.reshape(-1)


ONE_POSITION = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "deep": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "a sequence of one": (lambda: nn.Linear(4, 3), (1, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 4), (2, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), (2, 2, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 2, 2)),
    "dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2), (2, 3, 3)),
}


@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize(("build", "shape"), ONE_POSITION.values(), ids=ONE_POSITION.keys())
def test_one_example_is_exact_and_copies_of_it_give_the_same(build, shape, copies):
    model, x = seeded(build), data(1, *shape)
    target = target_for(model, x)
    grads = torch.autograd.grad(mean_loss(model(x), target), list(model.parameters()))
    by_parameter = dict(zip(model.parameters(), grads, strict=True))
    many = [t.repeat(copies, *[1] * (t.dim() - 1)) for t in (x, target)]
    factors = credo.kronecker_factors(model, lambda: mean_loss(model(many[0]), many[1]))
    layers = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), Tensor)}
    assert factors.keys() == layers.keys()
    for name, layer in layers.items():
        vector = gradient_vector(layer, by_parameter)
        a, g = factors[name]
        torch.testing.assert_close(torch.kron(a, g), torch.outer(vector, vector), rtol=1e-9, atol=1e-12)


def test_a_deep_linear_network_with_squared_loss_has_its_gauss_newton_blocks():
    """Residuals whose second moment is the identity: then G is JᵀJ, and A ⊗ G the Gauss–Newton block, exactly."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 2)))
    x = data(8, 4)
    signs = torch.tensor(list(itertools.product((1.0, -1.0), (1.0, -1.0)))).double().repeat(2, 1)
    target = model(x).detach() + signs  # mean of rrᵀ is I
    factors = credo.kronecker_factors(model, lambda: 0.5 * (model(x) - target).square().sum(1).mean())
    for name in ("0", "1", "2"):
        layer = model.get_submodule(name)
        block = torch.zeros(())
        for example, output in itertools.product(range(8), range(2)):
            grads = torch.autograd.grad(model(x)[example, output], list(layer.parameters()))
            vector = gradient_vector(layer, dict(zip(layer.parameters(), grads, strict=True)))
            block = block + torch.outer(vector, vector) / 8
        torch.testing.assert_close(torch.kron(*factors[name]), block, rtol=1e-9, atol=1e-12)


def factors_by_loop(a: Tensor, g: Tensor, sharing: str) -> tuple[Tensor, Tensor]:
    """From inputs (M, T, J) with the 1 appended and gradients (M, T, O) of each example's own loss."""
    count, positions = a.shape[:2]
    inputs = torch.zeros(a.shape[2], a.shape[2], dtype=a.dtype)
    outputs = torch.zeros(g.shape[2], g.shape[2], dtype=g.dtype)
    for i in range(count):
        if sharing == "reduce":
            inputs += torch.outer(a[i].mean(0), a[i].mean(0)) / count
            outputs += torch.outer(g[i].sum(0), g[i].sum(0)) / count
            continue
        for t in range(positions):
            inputs += torch.outer(a[i, t], a[i, t]) / count
            outputs += torch.outer(g[i, t], g[i, t]) / (count * positions)
    return inputs, outputs


def with_one(a: Tensor) -> Tensor:
    return torch.cat([a, torch.ones_like(a[..., :1])], -1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_sequences(sharing, reduction):
    layer, x = seeded(lambda: nn.Linear(4, 3)), data(5, 6, 4)
    target = target_for(layer, x)

    def loss() -> Tensor:
        return mean_loss(layer(x), target) * (5 if reduction == "sum" else 1)

    out = layer(x)
    (g,) = torch.autograd.grad(mean_loss(out, target) * 5, out)
    factors = credo.kronecker_factors(layer, loss, reduction, sharing=sharing)[""]
    torch.testing.assert_close(factors, factors_by_loop(with_one(x), g, sharing), rtol=1e-10, atol=1e-12)


def patches_by_loop(x: Tensor, conv: nn.Module, out_shape: torch.Size) -> Tensor:
    """(M, T, C·kernel) by indexing, place by place; the padding is done by torch.nn.functional.pad."""
    dims = len(conv.kernel_size)
    before = [p for p in reversed(conv.padding) for _ in (0, 1)]
    x = F.pad(x, before)
    rows = []
    for place in itertools.product(*(range(n) for n in out_shape[2:])):
        spots = [
            [place[d] * conv.stride[d] + k * conv.dilation[d] for k in range(conv.kernel_size[d])]
            for d in range(dims)
        ]
        columns = [x[(slice(None), slice(None), *spot)] for spot in itertools.product(*spots)]
        rows.append(torch.stack(columns, -1).flatten(1))  # (M, C·kernel)
    return torch.stack(rows, 1)


@settings(max_examples=25, deadline=None)
@given(
    dims=st.integers(1, 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    biased=st.booleans(),
    sharing=st.sampled_from(["expand", "reduce"]),
)
def test_convolutions(dims, kernel, stride, padding, dilation, groups, biased, sharing):
    build = (nn.Conv1d, nn.Conv2d)[dims - 1]
    conv = seeded(lambda: build(4, 6, kernel, stride, padding, dilation, groups, biased))
    x = data(3, 4, *[5] * dims)
    out = conv(x)
    target = target_for(conv, x)
    (g,) = torch.autograd.grad(mean_loss(out, target) * 3, out)
    a, outputs = credo.kronecker_factors(conv, lambda: mean_loss(conv(x), target), sharing=sharing)[""]
    stacks = (a, outputs) if groups == 2 else (a[None], outputs[None])
    for k in range(groups):
        own = patches_by_loop(x.chunk(groups, 1)[k], conv, out.shape)
        own_g = g.chunk(groups, 1)[k].flatten(2).transpose(1, 2)
        expected = factors_by_loop(with_one(own) if biased else own, own_g, sharing)
        torch.testing.assert_close((stacks[0][k], stacks[1][k]), expected, rtol=1e-9, atol=1e-12)


def test_wide_layers_in_chunks_and_panels():
    """Wide enough that the product is cut into panels, and large enough for several chunks of examples."""
    conv, x = seeded(lambda: nn.Conv2d(20, 4, 3, padding=1)), data(24, 20, 16, 16)
    a, _ = credo.kronecker_factors(conv, lambda: conv(x).square().mean(0).sum())[""]
    rows = with_one(F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(a, rows.T @ rows / 24, rtol=1e-10, atol=1e-10)


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2, padding="same")
        self.second = nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_padding_by_name_and_by_mode():
    model, x = seeded(Same), data(3, 2, 4, 4)
    target = target_for(model, x)
    factors = credo.kronecker_factors(model, lambda: mean_loss(model(x), target))
    rows = with_one(F.unfold(F.pad(x, [0, 1, 0, 1]), 2).transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(factors["first"][0], rows.T @ rows / 3, rtol=1e-10, atol=1e-12)
    hidden = F.pad(model.first(x).tanh().detach(), [1, 1, 1, 1], mode="circular")
    rows = with_one(F.unfold(hidden, 3).transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(factors["second"][0], rows.T @ rows / 3, rtol=1e-10, atol=1e-12)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.fc(self.fc(x).tanh()))


def test_a_reused_layer_is_refused_by_name():
    model, x = seeded(Tied), data(3, 4)
    with pytest.raises(UnsupportedOperation, match=r"'fc\.weight' is used more than once"):
        credo.kronecker_factors(model, lambda: model(x).square().sum(1).mean())


def test_what_has_no_factors_is_left_out_and_gradients_are_left_alone():
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))
    )
    x = data(4, 1, 5, 5)
    model[0].weight.requires_grad_(False)
    factors = credo.kronecker_factors(model, lambda: model(x).square().sum(1).mean())
    assert list(factors) == ["3"]
    assert all(p.grad is None for p in model.parameters())


def test_attention_counts_its_examples():
    model = seeded(lambda: nn.MultiheadAttention(4, 2, batch_first=True))
    x = data(3, 5, 4)
    factors = credo.kronecker_factors(model, lambda: model(x, x, x)[0].square().flatten(1).sum(1).mean())
    rows = with_one(x.flatten(0, 1))
    torch.testing.assert_close(factors["in_proj_weight"][0], rows.T @ rows / 3, rtol=1e-10, atol=1e-12)
    assert factors.keys() == {"in_proj_weight", "out_proj"}


def test_arguments_that_cannot_be_meant():
    layer, x = seeded(lambda: nn.Linear(2, 2)), data(3, 2)
    with pytest.raises(InvalidValue, match="sharing"):
        credo.kronecker_factors(layer, lambda: layer(x).mean(), sharing="both")
    with pytest.raises(InvalidValue, match="reduction"):
        credo.kronecker_factors(layer, lambda: layer(x).mean(), "none")
    with pytest.raises(InvalidType, match=r"shape \(3, 2\)"):
        credo.kronecker_factors(layer, lambda: layer(x))
