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
    """A curve with a gap in its middle."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1, -0.3, 60), torch.linspace(0.35, 1, 60)]).unsqueeze(1)
    return x, torch.sin(4 * x) + NOISE**0.5 * torch.randn(x.shape, generator=generator)


def train(x: torch.Tensor, y: torch.Tensor, steps: int) -> tuple[nn.Module, credo.DiagonalPosterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = credo.VOGN(model, lr=2e-2, data_size=len(x), damping=0.5, mc_samples=4, vectorized=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.step(lambda: 0.5 * (model(x) - y).square().squeeze(1) / NOISE)  # −log N(y; f(x), noise)
        rate.step()
    return model, optimizer.posterior(damped=False)


def main(path: str = "regression.png", steps: int = 4000) -> None:
    x, y = data()
    model, posterior = train(x, y, steps)
    grid = torch.linspace(-1.5, 1.5, 200).unsqueeze(1)
    prediction = credo.predict(model, posterior, grid, samples=100, task="regression", noise=NOISE)
    mean, sd = prediction.mean.squeeze(1), prediction.variance.sqrt().squeeze(1)
    known = prediction.epistemic.sqrt().squeeze(1)
    inside = (grid.squeeze(1).abs() < 0.25).nonzero().squeeze(1)
    at_data = (grid.squeeze(1) - 0.7).abs().argmin()
    print(
        f"sd of the function: {known[at_data]:.3f} at the data, {known[inside].max():.3f} in the gap, {known[-1]:.3f} outside"
    )
    figure, panel = plt.subplots(figsize=(7, 4))
    line = grid.squeeze(1)
    panel.fill_between(
        line, mean - 2 * sd, mean + 2 * sd, alpha=0.2, label="mean ± 2 sd, with the data's noise"
    )
    panel.fill_between(
        line, mean - 2 * known, mean + 2 * known, alpha=0.4, label="mean ± 2 sd of the function"
    )
    panel.plot(line, mean, "C0")
    panel.plot(line, torch.sin(4 * line), "k--", linewidth=1, label="truth")
    panel.plot(x, y, "k.", markersize=3)
    panel.set_ylim(-3, 3)
    panel.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
