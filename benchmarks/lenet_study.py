"""Adam's and VOGN's settings for LeNet-5 on CIFAR-10, four each, chosen on validation images.

    python -m benchmarks.lenet_study --data DIR

10,000 of the training images are kept apart and scored after ten epochs on the other 40,000; the test images are never
looked at. The rates of all fall to a tenth after eight epochs. A setting takes about a minute on two quiet cores.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from credo.data import Splits, load
from credo.experiments.recipe import Training
from credo.experiments.train import train

BASE = Training(
    "adam", "lenet5", "cifar10", settings={"lr": 1e-3}, epochs=10, batch_size=128, milestones=(8,)
)


def adam(lr: float, weight_decay: float) -> Training:
    return replace(BASE, settings={"lr": lr, "weight_decay": weight_decay})


def vogn(lr: float, prior_precision: float) -> Training:
    """The default damping, written out."""
    settings = {"lr": lr, "damping": 3e-2, "prior_precision": prior_precision}
    return replace(BASE, method="vogn", settings=settings)


SETTINGS = {
    "Adam lr=1e-3": adam(1e-3, 0.0),
    "Adam lr=1e-3 decay=2e-4": adam(1e-3, 2e-4),
    "Adam lr=2e-3": adam(2e-3, 0.0),
    "Adam lr=2e-3 decay=2e-4": adam(2e-3, 2e-4),
    "VOGN lr=1.5e-3 δ=1": vogn(1.5e-3, 1.0),
    "VOGN lr=1.5e-3 δ=10": vogn(1.5e-3, 10.0),
    "VOGN lr=3e-3 δ=1": vogn(3e-3, 1.0),
    "VOGN lr=3e-3 δ=10": vogn(3e-3, 10.0),
}  # a weight decay of 2e-4 is δ/N of δ = 10


def validation(root: Path) -> Splits:
    whole = load("cifar10", root)
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))
    return replace(whole, train=whole.train.subset(order[10_000:]), test=whole.train.subset(order[:10_000]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    splits = validation(parser.parse_args().data)
    for name, training in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            scores = train(replace(training, data=lambda: splits), 0, folder).metrics
        found = ", ".join(f"{key} {scores[key]:.4f}" for key in ("accuracy", "nll", "ece", "auroc"))
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
