"""Whole networks in float32, where torch's fast paths are: the loss is bitwise torch's, the gradients to rounding."""

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.models import MLP, AlexNet, LeNet5, ResNet18
from tests.curvature.oracle import relative_error

NETWORKS = {
    "MLP": (lambda: MLP((784, 100, 100, 10)), (32, 784)),
    "LeNet-5": (LeNet5, (16, 3, 32, 32)),
    "AlexNet": (AlexNet, (4, 3, 32, 32)),
    "ResNet-18, CIFAR stem": (lambda: ResNet18(stem="cifar", width=8), (8, 3, 32, 32)),
    "ResNet-18, ImageNet stem": (lambda: ResNet18(stem="imagenet", width=8), (8, 3, 64, 64)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_losses_and_gradients_are_torchs(name, channels_last, both_kernels):
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
    if channels_last and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    y = torch.arange(len(x)) % 10
    plain = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(plain, list(model.parameters()))
    with credo.capture(model) as stats:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    assert torch.equal(loss, plain)
    for (part, parameter), grad in zip(model.named_parameters(), grads, strict=True):
        assert relative_error(parameter.grad, grad) < 1e-4, part
        assert (
            stats.squares[parameter] * len(x) * 1.001 + 1e-20 >= (len(x) * parameter.grad).square()
        ).all(), part
