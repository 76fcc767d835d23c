"""VOGN's settings for LeNet-5 on CIFAR-10, chosen on validation images: `python -m benchmarks.lenet_study --data DIR`.

10,000 of the training images are kept apart and scored after ten epochs on the other 40,000; the test images are never
looked at. Adam with its default rate is there for comparison; the rates of all fall to a tenth after eight epochs. A
setting takes about a minute on two quiet cores.
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


def vogn(prior_precision: float) -> Training:
    """The defaults, written out, with this prior."""
    settings = {"lr": 1.5e-3, "damping": 3e-2, "prior_precision": prior_precision}
    return replace(BASE, method="vogn", settings=settings)


SETTINGS = {"Adam": BASE, "VOGN δ=1": vogn(1.0), "VOGN δ=10": vogn(10.0)}


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
