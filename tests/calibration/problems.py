"""Networks whose posterior is right by construction: every target is drawn from the predictive distribution itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import credo
from credo.posterior import DiagonalPosterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Normed(nn.Module):
    """Convolutions and BatchNorm, with running statistics that are not the initial ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.norm.running_mean += 0.1
        self.norm.running_var *= 2

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, outputs))


def rows(n: int) -> Tensor:
    return torch.randn(n, 5, generator=generator(1))


@dataclass(frozen=True)
class Problem:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    variance: float
    gain: float  # of the mean weights: without a signal there is nothing to be unsure about
    task: str = "classification"


PROBLEMS = {
    "mlp": Problem(mlp, rows, 0.3, 5),
    "convolution and batch norm": Problem(
        Normed, lambda n: torch.randn(n, 1, 4, 4, generator=generator(2)), 0.1, 4
    ),
    "transformer": Problem(Attention, lambda n: torch.randint(9, (n, 4), generator=generator(3)), 0.05, 4),
    "one logit": Problem(lambda: mlp(1), rows, 0.3, 5, "binary"),
    "labels": Problem(mlp, rows, 0.3, 5, "multilabel"),
    "regression": Problem(lambda: mlp(2), rows, 0.3, 1, "regression"),
}
NOISE = 0.1


def drawn(name: str, n: int = 300, draws: int = 100) -> tuple[nn.Module, DiagonalPosterior, Tensor, Tensor]:
    """A model, its posterior, and n examples: yᵢ ~ p(y|xᵢ, wᵢ), wᵢ ~ q, with so many different w."""
    problem = PROBLEMS[name]
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(4)
        model = problem.make().eval()
    with torch.no_grad():
        for m, p in model.named_parameters():
            p.mul_(1 if "norm" in m else problem.gain)
    q, x = around(model, problem.variance), problem.inputs(n)
    weights, parts = q.sample_many(generator(5), draws), []
    with torch.no_grad():
        for k in range(draws):
            part = torch.func.functional_call(model, {m: w[k] for m, w in weights.items()}, (x[k::draws],))
            parts.append(answers(part, problem.task, k))
    y = torch.empty(n, *parts[0].shape[1:], dtype=parts[0].dtype)
    for k, part in enumerate(parts):
        y[k::draws] = part
    return model, q, x, y


def around(model: nn.Module, variance: float) -> DiagonalPosterior:
    g, mean = generator(6), dict(model.named_parameters())
    spread = {m: variance * (0.5 + torch.rand(p.shape, generator=g)) for m, p in mean.items()}
    return DiagonalPosterior(mean, {m: v for m, v in spread.items() if "norm" not in m})


def answers(output: Tensor, task: str, seed: int) -> Tensor:
    g = generator(1000 + seed)
    if task == "regression":
        return output + NOISE**0.5 * torch.randn(output.shape, generator=g)
    if task in ("binary", "multilabel"):
        return (torch.rand(output.shape, generator=g) < output.sigmoid()).float()
    return torch.multinomial(output.softmax(-1), 1, generator=g).squeeze(1)


def options(name: str) -> dict[str, object]:
    task = PROBLEMS[name].task
    return {"task": task, "noise": NOISE} if task == "regression" else {"task": task}


def measured(model: nn.Module, posterior: object, x: Tensor, y: Tensor, **how: object) -> float:
    """The NLL by the way that users take: predict, then evaluate."""
    return credo.evaluate(credo.predict(model, posterior, x, **how), y)["nll"]  # type: ignore[call-overload,no-any-return]
