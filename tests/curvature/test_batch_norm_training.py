"""BatchNorm in training mode, where examples interact.

The truth: give each example its own copy of the affine parameters. The gradient with respect to
copy i is example i's contribution, and the copies' gradients sum to the gradient.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from tests.curvature.oracle import relative_error

pytestmark = pytest.mark.usefixtures("both_kernels")
SHAPES = {"1d": (6, 4), "1d sequence": (6, 4, 5), "2d": (6, 4, 5, 3), "3d": (6, 4, 3, 2, 2)}


def norm_for(x: Tensor) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.dim()]
    norm = kind(x.shape[1]).to(x.dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(x.shape[1], generator=torch.Generator().manual_seed(1)))
        norm.bias.copy_(torch.randn(x.shape[1], generator=torch.Generator().manual_seed(2)))
        norm.weight[0] = 0
    return norm


def data_for(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


def copies_truth(norm: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to (M, C) copies of weight and bias, and to x."""
    x = x.detach().requires_grad_()
    per_example = (len(x), x.shape[1], *[1] * (x.dim() - 2))
    copies = [p.detach().expand(per_example[:2]).clone().requires_grad_() for p in (norm.weight, norm.bias)]
    dims = [d for d in range(x.dim()) if d != 1]
    normed = (x - x.mean(dims, keepdim=True)) / (x.var(dims, unbiased=False, keepdim=True) + norm.eps).sqrt()
    out = normed * copies[0].view(per_example) + copies[1].view(per_example)
    loss = (out - target).pow(2).flatten(1).sum(1).sum()
    return torch.autograd.grad(loss, [*copies, x])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("channels_last", [False, True])
def test_squares_gradients_and_sum_rule(shape, channels_last):
    x, target = data_for(shape)
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    norm = norm_for(x)
    weights, biases, gx = copies_truth(norm, x, target)
    x = x.requires_grad_()
    with credo.capture(norm) as stats:
        (norm(x) - target).pow(2).flatten(1).sum(1).mean().backward()
    for parameter, copies in ((norm.weight, weights), (norm.bias, biases)):
        assert relative_error(stats.squares[parameter], copies.square().sum(0)) < 1e-10
        assert relative_error(parameter.grad * len(x), copies.sum(0)) < 1e-10
    assert relative_error(x.grad * len(x), gx) < 1e-10


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_running_statistics_and_loss_are_bitwise_torchs(shape):
    x, target = data_for(shape, torch.float32)
    plain, watched = norm_for(x), norm_for(x)
    expected = F.mse_loss(plain(x), target)
    with credo.capture(watched):
        loss = F.mse_loss(watched(x), target)
        loss.backward()
    assert torch.equal(loss, expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(watched.named_buffers())[name]), name


def test_batch_of_one_keeps_torchs_error():
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 value per channel"), credo.capture(norm):
        norm(torch.randn(1, 4))


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics(training):
    norm = nn.BatchNorm1d(4, track_running_stats=False).double().train(training)
    x, target = data_for((6, 4))
    weights, _, _ = copies_truth(norm, x, target)
    with credo.capture(norm) as stats:
        (norm(x) - target).pow(2).sum(1).mean().backward()
    assert relative_error(stats.squares[norm.weight], weights.square().sum(0)) < 1e-10


def test_inside_a_network_the_sum_rule_holds():
    """Each parameter's per-example shares sum to M times its gradient: Σgᵢ² ≥ (Σgᵢ)²/M by Cauchy–Schwarz."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    ).double()
    x = data_for((8, 3, 5, 5))[0]
    with credo.capture(net) as stats:
        F.cross_entropy(net(x), torch.arange(8) % 2).backward()
    for parameter in net.parameters():
        assert (stats.squares[parameter] * 8 * (1 + 1e-9) + 1e-25 >= (8 * parameter.grad).square()).all()
