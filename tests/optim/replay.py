"""Algorithm 1 by hand, from observed weights: a loop over examples, elementwise arithmetic, nothing from src."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

LossOfOne = Callable[[nn.Module, int], Tensor]


@dataclass
class Replay:
    """m, s and μ as the formulas say, for one group of parameters."""

    data_size: float
    lr: float
    momentum: float
    ema_rate: float
    prior_precision: float
    damping: float
    tempering: float
    prior_mean: dict[str, Tensor] = field(default_factory=dict)
    precisions: dict[str, Tensor] = field(default_factory=dict)
    m: dict[str, Tensor] = field(default_factory=dict)
    s: dict[str, Tensor] = field(default_factory=dict)

    def shrinkage(self, name: str) -> Tensor | float:
        return self.tempering * self.precisions.get(name, self.prior_precision) / self.data_size

    def variance(self, name: str) -> Tensor:
        return self.tempering / (self.data_size * (self.s[name] + self.shrinkage(name) + self.damping))

    def step(self, mean: dict[str, Tensor], g: dict[str, Tensor], h: dict[str, Tensor]) -> dict[str, Tensor]:
        new = {}
        for name, mu in mean.items():
            delta = self.shrinkage(name)
            self.m[name] = (
                self.momentum * self.m.get(name, 0.0)
                + g[name]
                + delta * (mu - self.prior_mean.get(name, 0.0))
            )
            self.s[name] = (1 - self.ema_rate) * self.s.get(name, h[name]) + self.ema_rate * h[name]
            new[name] = mu - self.lr * self.m[name] / (self.s[name] + delta + self.damping)
        return new


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def means_over_examples(
    model: nn.Module, samples: list[dict[str, Tensor]], loss_of_one: LossOfOne, examples: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """ĝ and ĥ over the samples and examples, one backward pass at a time."""
    g = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    h = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for weights in samples:
        copy = clone_with(model, weights)
        for i in range(examples):
            grads = torch.autograd.grad(loss_of_one(copy, i), list(copy.parameters()))
            for name, grad in zip(g, grads, strict=True):
                g[name] += grad / (examples * len(samples))
                h[name] += grad.square() / (examples * len(samples))
    return g, h


def clone_with(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    import copy

    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(weights[name])
    return twin
