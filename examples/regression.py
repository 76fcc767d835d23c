"""Regression in one dimension, with the uncertainty band.

    python -m examples.regression [picture.png]

The noise of the data is known here (sd 0.1); the rest of the band is what the network does not know.
"""

import sys

import matplotlib
import torch
from torch import nn

import credo

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOISE = 0.1**2


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 120).unsqueeze(1)
    return x, torch.sin(4 * x) + NOISE**0.5 * torch.randn(x.shape, generator=generator)


def train(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[nn.Module, credo.DiagonalPosterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1))
    optimizer = credo.VOGN(model, lr=5e-2, data_size=len(x), mc_samples=4, vectorized=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.step(lambda: 0.5 * (model(x) - y).square().squeeze(1) / NOISE)  # −log N(y; f(x), noise)
        rate.step()
    return model, optimizer.posterior()


def main(path: str = "regression.png", steps: int = 2000) -> None:
    x, y = data()
    model, posterior = train(x, y, steps)
    grid = torch.linspace(-2, 2, 200).unsqueeze(1)
    prediction = credo.predict(model, posterior, grid, samples=200, task="regression", noise=NOISE)
    mean, sd = prediction.mean.squeeze(1), prediction.variance.sqrt().squeeze(1)
    known, line = prediction.epistemic.sqrt().squeeze(1), grid.squeeze(1)
    print(f"sd of the function: {known[line.abs() < 1].mean():.3f} among the data, {known[-1]:.3f} at x = 2")
    figure, panel = plt.subplots(figsize=(7, 4))
    panel.fill_between(
        line, mean - 2 * sd, mean + 2 * sd, alpha=0.2, label="mean ± 2 sd, with the data's noise"
    )
    panel.fill_between(
        line, mean - 2 * known, mean + 2 * known, alpha=0.4, label="mean ± 2 sd of the function"
    )
    panel.plot(line, mean, "C0")
    panel.plot(line, torch.sin(4 * line), "k--", linewidth=1, label="truth")
    panel.plot(x, y, "k.", markersize=3)
    panel.set_ylim(-4, 4)
    panel.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
