"""A small classifier, a batch for it, and its squares by a loop over the examples."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.curvature.oracle import relative_error


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def batch(size: int = 10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def truth(net: nn.Module, x, y) -> dict[str, torch.Tensor]:
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        for name, grad in zip(sums, grads, strict=True):
            sums[name] += grad.square()
    return sums


def assert_squares(stats, net, expected, bar=1e-10):
    for name, parameter in net.named_parameters():
        assert relative_error(stats.squares[parameter].to(expected[name].dtype), expected[name]) < bar, name
