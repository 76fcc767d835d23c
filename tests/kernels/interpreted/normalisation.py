"""BatchNorm's way back against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.triton.normalisation import batch_norm_backward

SHAPES = [(4, 70), (3, 2, 40, 30), (33, 2), (2, 1, 1, 2), (2, 3, 2, 3, 2)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def truth(x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, training: bool, eps: float):
    """gx from autograd, and aᵢ and bᵢ written out."""
    leaf = x.double().requires_grad_()
    own = weight if weight is None else weight.double()
    out = F.batch_norm(leaf, mean.clone(), var.clone(), own, None, training, 0.0, eps)
    (gx,) = torch.autograd.grad(out, leaf, g.double())
    along = (1, -1, *[1] * (x.dim() - 2))
    over = (0, *range(2, x.dim()))
    if training:
        mean, var = x.double().mean(over), x.double().var(over, unbiased=False)
    normed = (x.double() - mean.view(along)) / (var.view(along) + eps).sqrt()
    a, b = ((own if x.dim() == 2 else own.flatten(2).sum(2)) for own in (normed * g.double(), g.double()))
    return (gx, a.sum(0), a.square().sum(0), b.sum(0), b.square().sum(0)), mean, (var + eps).rsqrt()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_all_shapes(shape, training):
    compare(shape, torch.float64, training, affine=True, last=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_types_and_layouts(dtype, last, affine):
    compare((3, 3, 3, 5), dtype, True, affine, last)


def compare(shape: tuple[int, ...], dtype: torch.dtype, training: bool, affine: bool, last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    if last:
        x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    weight = torch.randn(shape[1], generator=generator, dtype=wide) if affine else None
    running = (
        torch.randn(shape[1], generator=generator).double(),
        torch.rand(shape[1], generator=generator).double(),
    )
    expected, mean, invstd = truth(x, g, weight, *running, training, 1e-3)
    found = batch_norm_backward(x, g, weight, mean.to(wide), invstd.to(wide), training, True)
    assert found[0] is not None
    assert found[0].dtype is dtype
    assert found[0].stride() == torch.empty_like(x).stride()
    assert all(own.dtype is wide for own in found[1:])
    for k, (actual, own) in enumerate(zip(found, expected, strict=True)):
        tolerance = TOLERANCE[dtype] if k == 0 else min(TOLERANCE[dtype], 1e-5)
        assert (actual.double() - own).abs().max() <= tolerance * own.abs().max()


def test_gaps_between_elements():
    x, g = torch.randn(3, 4, 6, 6).double()[..., ::2], torch.randn(3, 4, 6, 3).double()
    weight, running = torch.rand(4).double(), (torch.zeros(4).double(), torch.ones(4).double())
    expected, mean, invstd = truth(x, g, weight, *running, True, 1e-3)
    found = batch_norm_backward(x, g, weight, mean, invstd, True, True)
    for actual, own in zip(found, expected, strict=True):
        assert actual is not None
        assert (actual - own).abs().max() <= 1e-12 * own.abs().max()


def test_the_input_may_need_no_gradient():
    found = batch_norm_backward(
        torch.ones(2, 3), torch.ones(2, 3), None, torch.zeros(3), torch.ones(3), True, False
    )
    assert found[0] is None
    assert torch.equal(found[3], torch.full((3,), 2.0))


def test_what_it_is_not_for():
    empty = torch.ones(0, 3)
    assert (
        batch_norm_backward(empty, empty, None, torch.zeros(3), torch.ones(3), True, True) is NotImplemented
    )
