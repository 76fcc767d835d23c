"""Whether variances are learned: how they differ between weights, and whether they follow the curvature.

    python -m benchmarks.learned_variances --data DIR --out results/learned_variances.json

LeNet-5 and an MLP on Fashion-MNIST, trained by VOGN, IVON (credo's defaults, and its paper's numbers), Bayes by
Backprop, and Adam with the diagonal Laplace approximation. Then for each:

- the standard deviation of log₁₀ σ² within a tensor (weighted mean over tensors) and of the tensors' means,
- Spearman's rank correlation of 1/σ² with the exact diagonal of the Gauss–Newton matrix at the mean, within tensors and
  over all weights. The diagonal is Σ_c p_c (∂ log p_c)², one pass of the engine for each class,
- test accuracy at the mean when the weights with the smallest |μ|/σ are set to 0, beside pruning by |μ| alone.

Nothing is fitted afterwards: σ² is what the optimiser's posterior says.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import credo
from credo.data import load
from credo.models import MLP, LeNet5

BATCH, EPOCHS, RATE_FROM = 128, 20, 15  # from this epoch on, a tenth of the rate where the rate is given
CURVATURE_EXAMPLES = 10_000
PRUNED = (0.0, 0.5, 0.75, 0.9, 0.95)
Weights = Mapping[str, Tensor]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-5": lambda: LeNet5(in_channels=1, image_size=28),
    "MLP 100-100": MLP,
}
METHODS: dict[str, Callable[[nn.Module, int, int], torch.optim.Optimizer]] = {
    "VOGN": lambda model, n, seed: credo.VOGN(model, data_size=n, seed=seed),
    "IVON": lambda model, n, seed: credo.IVON(model, data_size=n, seed=seed),
    "IVON, its paper's": lambda model, n, seed: credo.IVON(model, data_size=n, lr=0.2, seed=seed),
    "Bayes by Backprop": lambda model, n, seed: credo.BayesByBackprop(model, data_size=n, seed=seed),
    "Adam + Laplace": lambda model, n, seed: torch.optim.Adam(model.parameters()),
}


def images(root: Path | None, train_size: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    splits = load("fashion_mnist", root)
    order = torch.randperm(len(splits.train.targets), generator=torch.Generator().manual_seed(5))[:train_size]
    train = splits.normalise(splits.train.inputs[order]), splits.train.targets[order]
    return *train, splits.normalise(splits.test.inputs), splits.test.targets


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, seed: int) -> None:
    order = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        if epoch == RATE_FROM:
            for group in optimizer.param_groups:
                group["lr"] *= 1 if group.get("relative_lr") else 0.1
        for batch in torch.randperm(len(x), generator=order).split(BATCH):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            optimizer.step(closure)


def posterior_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> credo.DiagonalPosterior:
    if isinstance(optimizer, torch.optim.Adam):
        pairs = list(zip(x.split(500), y.split(500), strict=True))
        found = credo.laplace(model, pairs, structure="diagonal")
    else:
        found = optimizer.posterior()  # type: ignore[attr-defined]
    assert isinstance(found, credo.DiagonalPosterior)
    return found


def gauss_newton(model: nn.Module, mean: Weights, x: Tensor) -> Weights:
    """diag Σᵢ Jᵢᵀ(diag pᵢ − pᵢpᵢᵀ)Jᵢ = Σᵢ Σ_c pᵢ_c (∂ log pᵢ_c)², the expectation over the model's own labels."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in mean.items()}
    parameters = dict(model.named_parameters())
    for part in x.split(1000):
        with torch.no_grad():
            probs = model(part).softmax(1)
        for c in range(probs.shape[1]):
            labels = torch.full((len(part),), c)
            with credo.capture(model, reduction="sum") as statistics:
                losses = F.cross_entropy(model(part), labels, reduction="none")
                (probs[:, c].sqrt() * losses).sum().backward()
            for name, parameter in parameters.items():
                total[name] += statistics.squares[parameter].double()
                parameter.grad = None
    return total


# What is measured


def spread(variance: Weights) -> dict[str, float]:
    logs = [tensor.double().log10().flatten() for tensor in variance.values() if tensor.numel() > 1]
    sizes = torch.tensor([float(len(one)) for one in logs])
    within = torch.stack([one.std() for one in logs])
    means = torch.stack([one.mean() for one in logs])
    return {
        "within": float((within * sizes).sum() / sizes.sum()),
        "between": float(means.std()),
    }


def ranks(values: Tensor) -> Tensor:
    """Mean ranks of ties."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def spearman(one: Tensor, other: Tensor) -> float:
    pair = torch.stack([ranks(one.flatten()), ranks(other.flatten())])
    return float(torch.corrcoef(pair)[0, 1])


def agreement(variance: Weights, diagonal: Weights) -> dict[str, float]:
    """Of precision and curvature; a tensor whose variances are all equal agrees with nothing: 0."""
    names = [name for name, tensor in variance.items() if tensor.numel() > 1]
    sizes = torch.tensor([float(variance[name].numel()) for name in names])
    inside = torch.tensor([spearman(1 / variance[name].double(), diagonal[name]) for name in names])
    every = (
        torch.cat([weights[name].double().flatten() for name in names]) for weights in (variance, diagonal)
    )
    precision, curvature = every
    return {
        "within": float((inside.nan_to_num() * sizes).sum() / sizes.sum()),
        "all": spearman(1 / precision, curvature),
    }


def pruned(model: nn.Module, mean: Weights, score: Weights, x: Tensor, y: Tensor) -> dict[str, float]:
    """Test accuracy when the weights with the lowest scores, of all tensors together, are set to 0."""
    every = torch.cat([tensor.flatten() for tensor in score.values()])
    found = {}
    for share in PRUNED:
        limit = every.kthvalue(max(1, int(share * len(every)))).values if share else torch.tensor(-1.0)
        kept = {name: tensor * (score[name] > limit) for name, tensor in mean.items()}
        with torch.no_grad():
            outputs = torch.cat([functional_call(model, kept, part) for part in x.split(1000)])
        found[f"{share:g}"] = float((outputs.argmax(1) == y).double().mean())
    return found


def study(name: str, method: str, seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = METHODS[method](model, len(x), seed)
    started = time.perf_counter()
    train(model, optimizer, x, y, seed)
    seconds = time.perf_counter() - started
    model.eval()
    posterior = posterior_of(model, optimizer, x, y)
    mean, variance = posterior.mean, posterior.variance
    diagonal = gauss_newton(model, mean, x[:CURVATURE_EXAMPLES])
    prediction = credo.predict(model, posterior, test_x, samples=32, seed=seed)
    metrics = credo.evaluate(prediction, test_y)
    ratio = {key: mean[key].abs() / variance[key].sqrt() for key in mean}
    return {
        "model": name,
        "method": method,
        "seed": seed,
        "examples": len(x),
        "epochs": EPOCHS,
        "seconds": round(seconds, 1),
        **{key: float(metrics[key]) for key in ("accuracy", "nll", "ece")},
        "spread": spread(variance),
        "agreement": agreement(variance, diagonal),
        "pruned_by_ratio": pruned(model, mean, ratio, test_x, test_y),
        "pruned_by_size": pruned(model, mean, {key: t.abs() for key, t in mean.items()}, test_x, test_y),
    }


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--train-size", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/learned_variances.json"))
    options = parser.parse_args()
    data = images(options.data, options.train_size)
    done = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    known = {(run["model"], run["method"], run["seed"]) for run in done}
    for seed in range(options.seeds):
        for name in MODELS:
            for method in METHODS:
                if (name, method, seed) not in known:
                    done.append(study(name, method, seed, data))
                    print(json.dumps(done[-1]), flush=True)
                    text = json.dumps({"torch": torch.__version__, "runs": done}, indent=1)
                    options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
