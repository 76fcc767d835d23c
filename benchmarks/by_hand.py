"""VOGN on a multilayer perceptron as one would write it by hand: the least that its arithmetic costs in plain torch.

No checks, no other layers, no way back to the mean when something fails. What is above it in `make bench` is the price
of a library; what is above Adam in it no library without a compiler can save.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE, Absent, Contender, Running

DAMPING, BETA1, BETA2 = 0.03, 0.9, 0.1


class Squaring(torch.autograd.Function):
    """A linear layer whose backward pass leaves Σᵢgᵢ² of its weight and bias in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, squares: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.squares = squares
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        squared = g * g
        ctx.squares[:] = torch.mm(squared.T, x * x), squared.sum(0)
        return g @ weight if ctx.needs_input_grad[0] else None, torch.mm(g.T, x), g.sum(0), None


def by_hand(problem: Problem) -> Running:
    layers = [module for module in problem.model.modules() if isinstance(module, nn.Linear)]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    if len(parameters) != len(list(problem.model.parameters())):
        raise Absent("by hand there are linear layers only")
    squares: list[list[Tensor]] = [[] for _ in layers]
    weights = [p.detach() for p in parameters]
    momenta, curvatures = [torch.zeros_like(w) for w in weights], [torch.ones_like(w) for w in weights]
    noise, generator = torch.empty(sum(w.numel() for w in weights)), torch.Generator()
    noises = [
        n.view(w.shape) for n, w in zip(noise.split([w.numel() for w in weights]), weights, strict=True)
    ]
    shrinkage, examples = 1 / DATA_SIZE, len(problem.x)

    def loss() -> Tensor:
        x = problem.x
        for layer, own in zip(layers, squares, strict=True):
            x = Squaring.apply(x if layer is layers[0] else torch.relu(x), layer.weight, layer.bias, own)
        return F.cross_entropy(x, problem.y)

    def step() -> None:
        noise.normal_(generator=generator)
        means = [w.clone() for w in weights]
        for w, s, n in zip(weights, curvatures, noises, strict=True):
            w.addcdiv_(n, (s + (shrinkage + DAMPING)).sqrt_(), value=DATA_SIZE**-0.5)
        for p in parameters:
            p.grad = None
        loss().backward()
        hs = [h for own in squares for h in own]
        torch._foreach_mul_(momenta, BETA1)
        torch._foreach_add_(momenta, [p.grad for p in parameters])
        torch._foreach_add_(momenta, means, alpha=shrinkage)
        torch._foreach_mul_(curvatures, 1 - BETA2)
        torch._foreach_add_(curvatures, hs, alpha=BETA2 * examples)  # hs are of gᵢ/M
        for w, mean, m, s in zip(weights, means, momenta, curvatures, strict=True):
            torch.addcdiv(mean, m, s + (shrinkage + DAMPING), value=-LEARNING_RATE, out=w)

    return Running(step)


BY_HAND = Contender("by-hand", "VOGN by hand, plain torch", by_hand)
