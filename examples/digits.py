"""Handwritten digits: Adam and VOGN side by side, with the digits 8 and 9 kept out as unfamiliar inputs.

python -m examples.digits
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import credo


def data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Train and test of the digits 0–7, and the images of 8 and 9."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    seen = y < 8
    cut = int(0.8 * int(seen.sum()))
    familiar = x[seen], y[seen]
    return (familiar[0][:cut], familiar[1][:cut]), (familiar[0][cut:], familiar[1][cut:]), x[~seen]


def train(
    optimizer: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int
) -> float:
    """The same loop for every optimiser; returns the seconds an epoch took."""
    generator, start = torch.Generator().manual_seed(1), time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(32):

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            optimizer.step(closure)
    return (time.perf_counter() - start) / epochs


def main(epochs: int = 30) -> None:
    (x, y), (x_test, y_test), unfamiliar = data()
    print(f"{'':6} accuracy    NLL    ECE  AUROC  OOD AUROC  OOD FPR95  s/epoch")
    for name in ("Adam", "VOGN"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 8))
        optimizer = (
            torch.optim.Adam(model.parameters()) if name == "Adam" else credo.VOGN(model, data_size=len(x))
        )
        seconds = train(optimizer, model, x, y, epochs)
        posterior = "mean" if name == "Adam" else optimizer.posterior()
        known, unknown = (
            credo.predict(model, posterior, inputs, samples=30) for inputs in (x_test, unfamiliar)
        )
        s = credo.evaluate(known, y_test, ood=unknown)
        print(
            f"{name:6} {s['accuracy']:8.3f} {s['nll']:6.3f} {s['ece']:6.3f} {s['auroc']:6.3f} "
            f"{s['ood_auroc']:10.3f} {s['ood_fpr95']:10.3f} {seconds:8.3f}"
        )


if __name__ == "__main__":
    main()
