"""Two moons: the decision boundary of the mean, and those of a few samples of the posterior.

    python -m examples.two_moons [picture.png]

Far from the data the samples disagree: mutual information is several times what it is at the data. The averaged
prediction is only a little less sure there: the noise is a small share of the weights (docs/defaults.md), and all
samples agree in most of the plane. For doubt about unfamiliar inputs look at mutual information rather than at entropy.
"""

import sys

import matplotlib
import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import nn

import credo

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def train(x: torch.Tensor, y: torch.Tensor, steps: int = 1500) -> tuple[nn.Module, credo.DiagonalPosterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = credo.VOGN(model, data_size=len(x))
    for _ in range(steps):
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    return model, optimizer.posterior()


def plane() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    axes = torch.meshgrid(torch.linspace(-3, 4, 120), torch.linspace(-3, 3.5, 120), indexing="xy")
    return torch.stack([axis.flatten() for axis in axes], 1), axes


def draw(
    path: str, x: torch.Tensor, y: torch.Tensor, model: nn.Module, posterior: credo.DiagonalPosterior
) -> None:
    points, axes = plane()
    mean = credo.predict(model, "mean", points).probs[:, 1].view(120, 120)
    averaged = credo.predict(model, posterior, points, samples=50, keep_samples=True)
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), sharex=True, sharey=True)
    panels[0].set_title("probability, the mean alone")
    panels[0].contourf(*axes, mean, 20, cmap="RdBu", vmin=0, vmax=1)
    panels[1].set_title("probability, averaged over the posterior")
    panels[1].contourf(*axes, averaged.probs[:, 1].view(120, 120), 20, cmap="RdBu", vmin=0, vmax=1)
    panels[2].set_title("boundaries of 12 samples, on mutual information")
    panels[2].contourf(*axes, averaged.mutual_information.view(120, 120), 20, cmap="Greys")
    for sample in averaged.samples[:12]:
        panels[2].contour(*axes, sample[:, 1].view(120, 120), [0.5], colors="tab:red", linewidths=0.7)
    for panel in panels:
        panel.scatter(*x.T, c=y, cmap="RdBu", s=8, edgecolors="k", linewidths=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(path: str = "two_moons.png", steps: int = 1500) -> None:
    inputs, labels = make_moons(300, noise=0.15, random_state=0)
    x, y = torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels)
    model, posterior = train(x, y, steps)
    points, _ = plane()
    far = points[torch.cdist(points, x).min(1).values > 2]
    accuracy = credo.metrics.accuracy(credo.predict(model, posterior, x, samples=50).probs, y)
    print(f"accuracy {accuracy:.3f}")
    for name, inputs in (("at the data", x), ("2 and more away", far)):
        doubt = credo.predict(model, posterior, inputs, samples=50)
        entropy, information = doubt.entropy.mean(), doubt.mutual_information.mean()
        print(f"{name}: entropy {entropy:.3f}, mutual information {information:.4f} nats")
    draw(path, x, y, model, posterior)
    print(f"picture: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
