"""Whether the defaults work: VOGN and Adam, both untouched, for the same epochs: `python -m benchmarks.defaults`.

scikit-learn's digits with several networks, batch sizes and amounts of data; with `--data DIR` LeNet-5 on CIFAR-10 too.
Scores are on images kept apart from training images, never on the test sets; means of three seeds.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.data import load
from credo.models import LeNet5

SEEDS, SAMPLES = range(3), 20
Split = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: int
    epochs: int
    data: Split


def mlp(*sizes: int) -> nn.Module:
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def kept_apart(name: str, root: Path, size: int, validation: int) -> Split:
    splits = load(name, root)
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(5))
    train, held = order[validation:][:size], order[:validation]
    x, y = splits.normalise(splits.train.inputs), splits.train.targets
    return x[train], y[train], x[held], y[held]


def scores(case: Case, seed: int, make: Callable[[nn.Module, int], torch.optim.Optimizer]) -> dict[str, Any]:
    x, y, x_held, y_held = case.data
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.build()
    optimizer, generator = make(model, len(x)), torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        for batch in torch.randperm(len(x), generator=generator).split(case.batch):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            optimizer.step(closure)
    belief = optimizer.posterior() if isinstance(optimizer, credo.VOGN) else "mean"
    prediction = credo.predict(model, belief, x_held, samples=SAMPLES)
    return credo.evaluate(prediction, y_held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="where CIFAR-10 lies")
    root = parser.parse_args().data
    small, large = kept_apart("digits", Path(), 300, 350), kept_apart("digits", Path(), 1087, 350)
    cases = [
        Case("digits 300, MLP 100, batch 32, 40 epochs", lambda: mlp(64, 100, 10), 32, 40, small),
        Case("digits 1087, MLP 100, batch 32, 20 epochs", lambda: mlp(64, 100, 10), 32, 20, large),
        Case("digits 1087, MLP 100-100, batch 64, 20 epochs", lambda: mlp(64, 100, 100, 10), 64, 20, large),
    ]
    if root is not None:
        data = kept_apart("cifar10", root, 40_000, 10_000)
        cases.append(Case("CIFAR-10 40000, LeNet-5, batch 128, 8 epochs", LeNet5, 128, 8, data))
    for case in cases:
        print(case.name, flush=True)
        for method, make in (
            ("Adam", lambda model, n: torch.optim.Adam(model.parameters())),
            ("VOGN", lambda model, n: credo.VOGN(model, data_size=n)),
        ):
            found = [scores(case, seed, make) for seed in SEEDS]
            words = (
                f"{key} {statistics.mean(float(f[key]) for f in found):.4f}" for key in ("accuracy", "nll")
            )
            print(f"  {method}: {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
