"""VOGN's settings for LeNet-5 on CIFAR-10, chosen on validation images: `python -m benchmarks.lenet_study --data DIR`.

10,000 of the training images are kept apart and scored after ten epochs on the other 40,000; the test images are never
looked at. Adam with its default rate is there for comparison. The rates of all fall to a tenth after eight epochs. About a
minute a setting on two quiet cores.
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


def vogn(lr: float, damping: float, prior_precision: float, rise: float = 0.0) -> Training:
    """With `rise`, τ goes from 0.1 to 1 over that many epochs."""
    settings = {"lr": lr, "damping": damping, "prior_precision": prior_precision}
    start = {"tempering_from": 0.1, "tempering_epochs": rise} if rise else {}
    return replace(BASE, method="vogn", settings=settings, **start)


SETTINGS = {
    "VOGN α=1.5e-3 γ=3e-2 δ=1": vogn(1.5e-3, 3e-2, 1),
    "Adam": BASE,
    "VOGN α=1.5e-3 γ=3e-2 δ=10": vogn(1.5e-3, 3e-2, 10),
    "VOGN α=2e-3 γ=3e-2 δ=1": vogn(2e-3, 3e-2, 1),
    "VOGN α=1.5e-3 γ=2e-2 δ=10, τ rising over 5 epochs": vogn(1.5e-3, 2e-2, 10, rise=5),
}


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
