"""K-FAC by hand for a network of two linear layers: loops over examples, dense Kronecker products, nothing from src."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
LAYERS = ("0", "2")


def factors_at(weights: Weights, x: Tensor, y: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], Weights]:
    """A, G and the mean gradient of a tanh network's cross-entropy, example by example."""
    sums = {name: (torch.zeros(()), torch.zeros(())) for name in LAYERS}
    mean = {name: torch.zeros_like(w) for name, w in weights.items()}
    for i in range(len(x)):
        own = {name: w.clone().requires_grad_() for name, w in weights.items()}
        first = x[i] @ own["0.weight"].T + own["0.bias"]
        second = first.tanh() @ own["2.weight"].T + own["2.bias"]
        loss = F.cross_entropy(second[None], y[i : i + 1])
        *grads, g_first, g_second = torch.autograd.grad(loss, [*own.values(), first, second])
        for name, grad in zip(own, grads, strict=True):
            mean[name] += grad / len(x)
        for name, a, g in (("0", x[i], g_first), ("2", first.tanh().detach(), g_second)):
            a = torch.cat([a, torch.ones(1, dtype=a.dtype)])
            old = sums[name]
            sums[name] = old[0] + torch.outer(a, a) / len(x), old[1] + torch.outer(g, g) / len(x)
    return sums, mean


@dataclass
class KroneckerReplay:
    data_size: float
    lr: float
    momentum: float
    ema_rate: float
    prior_precision: float
    damping: float
    tempering: float
    form: str
    prior: tuple[Weights, Weights] | None = None  # mean, precision
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    precision: dict[str, Tensor] = field(default_factory=dict)  # H, dense, as it was at the last inversion
    m: Weights = field(default_factory=dict)

    def shrinkage(self, name: str) -> Tensor | float:
        delta = self.prior_precision if self.prior is None else self.prior[1][name]
        return self.tempering * delta / self.data_size

    def damping_of(self, layer: str) -> float:
        """δ̃ + γ; the mean of δ̃ over the layer where it differs."""
        parts = [self.shrinkage(f"{layer}.{kind}") for kind in ("weight", "bias")]
        if self.prior is None:
            return float(parts[0]) + self.damping
        return float(torch.cat([part.flatten() for part in parts]).mean()) + self.damping

    def learn(self, found: dict[str, tuple[Tensor, Tensor]]) -> None:
        for layer, new in found.items():
            old = self.factors.get(layer, new)
            self.factors[layer] = tuple(
                (1 - self.ema_rate) * o + self.ema_rate * n for o, n in zip(old, new, strict=True)
            )

    def invert(self) -> None:
        for layer, (a, g) in self.factors.items():
            gamma = self.damping_of(layer)
            if self.form == "eigen":
                self.precision[layer] = torch.kron(a, g) + gamma * torch.eye(len(a) * len(g)).double()
                continue
            pi = (torch.linalg.eigvalsh(a).mean() / torch.linalg.eigvalsh(g).mean()).sqrt()
            damped_a = a + pi * gamma**0.5 * torch.eye(len(a)).double()
            damped_g = g + gamma**0.5 / pi * torch.eye(len(g)).double()
            self.precision[layer] = torch.kron(damped_a, damped_g)

    def step(self, mean: Weights, g: Weights) -> Weights:
        for name, mu in mean.items():
            centre = 0.0 if self.prior is None else self.prior[0][name]
            pull = self.shrinkage(name) * (mu - centre)
            self.m[name] = self.momentum * self.m.get(name, 0.0) + g[name] + pull
        new = {}
        for layer in LAYERS:
            weight, bias = self.m[f"{layer}.weight"], self.m[f"{layer}.bias"]
            matrix = torch.cat([weight, bias[:, None]], 1)
            step = torch.linalg.solve(self.precision[layer], matrix.T.reshape(-1)).view(matrix.T.shape).T
            new[f"{layer}.weight"] = mean[f"{layer}.weight"] - self.lr * step[:, :-1]
            new[f"{layer}.bias"] = mean[f"{layer}.bias"] - self.lr * step[:, -1]
        return new

    def covariance(self, layer: str) -> Tensor:
        return self.tempering / self.data_size * torch.linalg.inv(self.precision[layer])
