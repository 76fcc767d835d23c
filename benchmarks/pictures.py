"""The pictures of the site that are no tutorial's: `python -m benchmarks.pictures [FOLDER]`, docs/figures unless given.

two-moons.png: decision boundaries of networks drawn from VOGN's posterior, as data arrive (about ten seconds).
step-time.png: the table of docs/benchmarks.md as bars.
demo.png: calibration, and entropy of familiar and unfamiliar inputs, of one seed of `credo demo` (about ten seconds).
"""

import sys
from functools import partial
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits, make_moons
from torch import nn

import credo

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "docs"))
from style import ADAM, GREY, STYLE, VOGN

SIZES = (4, 16, 64, 256)


def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def boundaries(path: Path, steps: int = 1500) -> None:
    """One panel for each number of examples, twenty networks in each."""
    points, labels = make_moons(SIZES[-1], noise=0.15, random_state=1)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    order = torch.cat(
        [torch.stack([(y == c).nonzero().flatten() for c in (0, 1)], 1).flatten()]
    )  # classes in turn
    axes = torch.meshgrid(torch.linspace(-2.2, 3.2, 140), torch.linspace(-1.7, 2.2, 140), indexing="xy")
    plane = torch.stack([axis.flatten() for axis in axes], 1)
    figure, panels = plt.subplots(1, len(SIZES), figsize=(11, 2.7), sharex=True, sharey=True)
    for panel, size in zip(panels, SIZES, strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        seen, classes = x[order[:size]], y[order[:size]]
        optimizer = credo.VOGN(model, data_size=size)
        for _ in range(steps):
            optimizer.step(partial(losses, model, seen, classes))
        drawn = credo.predict(model, optimizer.posterior(), plane, samples=20, keep_samples=True)
        panel.contourf(
            *axes, drawn.probs[:, 1].view(140, 140), 20, cmap="PuOr", vmin=-0.6, vmax=1.6, alpha=0.45
        )
        for sample in drawn.samples:
            panel.contour(*axes, sample[:, 1].view(140, 140), [0.5], colors=VOGN, linewidths=0.7)
        panel.scatter(
            *seen.T, c=classes, cmap="PuOr", vmin=-0.4, vmax=1.4, s=18, edgecolors="k", linewidths=0.4
        )
        panel.set_title(f"{size} examples")
        panel.set_axis_off()
    figure.savefig(path)


def demo(path: Path, epochs: int = 60) -> None:
    """Digits 0 to 7 in training; 8 and 9 are unfamiliar."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    known = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    known = known[y[known] < 8]
    train, test, unfamiliar = known[:300], known[300:], y >= 8
    answers = {}
    for method in ("Adam", "VOGN"):
        torch.manual_seed(0)
        model = credo.models.MLP((64, 100, 8))
        make = {
            "Adam": lambda m: torch.optim.Adam(m.parameters()),
            "VOGN": lambda m: credo.VOGN(m, data_size=300),
        }
        optimizer = make[method](model)
        for _ in range(epochs):
            for batch in train[torch.randperm(300)].split(32):
                optimizer.zero_grad()
                with optimizer.sampled() if method == "VOGN" else torch.enable_grad():
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        posterior = optimizer.posterior() if method == "VOGN" else "mean"
        answers[method] = [
            credo.predict(model, posterior, x[rows], samples=30) for rows in (test, unfamiliar)
        ]

    figure, (left, *panels) = plt.subplots(1, 3, figsize=(11, 3))
    left.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for colour, (method, (familiar, _)) in zip((ADAM, VOGN), answers.items(), strict=True):
        curve = credo.metrics.calibration_curve(familiar.probs, y[test], bins=8)
        some = curve.examples > 0
        left.plot(
            curve.confidence[some], curve.accuracy[some], "o-", color=colour, label=method, markersize=4
        )
    left.set(
        xlabel="confidence",
        ylabel="accuracy",
        title="calibration on 0 to 7",
        xlim=(0.2, 1.02),
        ylim=(0, 1.05),
    )
    left.legend()
    for panel, (method, both) in zip(panels, answers.items(), strict=True):
        for prediction, colour, label in zip(both, (VOGN, ADAM), ("0 to 7", "8 and 9"), strict=True):
            panel.hist(
                prediction.entropy, 20, range=(0, 2.08), color=colour, alpha=0.65, density=True, label=label
            )
        panel.set(xlabel="entropy of the prediction, nats", title=f"{method}: familiar and unfamiliar digits")
        panel.set_yticks([])
    panels[0].legend()
    figure.savefig(path)


def step_time(path: Path) -> None:
    """The numbers stand in docs/benchmarks.md, once."""
    lines = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text().splitlines()
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]
    networks = rows[0][1:]
    shown = ("VOGN", "IVON of credo", "IVON of ivon-opt", "Bayes by Backprop", "VOGN without kernels")
    end = next(i for i, row in enumerate(rows) if row[0].startswith("peak memory"))
    times = {row[0]: list(map(float, row[1:])) for row in rows[2:end] if row[0] in shown}
    figure, panel = plt.subplots(figsize=(9, 3))
    panel.axhline(1, color=GREY, linewidth=0.8)
    for i, name in enumerate(shown):
        places = [k + (i - 2) * 0.16 for k in range(len(networks))]
        panel.bar(places, times[name], width=0.15, label=name)
    panel.set_xticks(range(len(networks)), networks)
    panel.set(ylabel="time of a step / Adam's")
    panel.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    figure.savefig(path)


def main(folder: str = "docs/figures") -> None:
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        boundaries(Path(folder, "two-moons.png"))
        step_time(Path(folder, "step-time.png"))
        demo(Path(folder, "demo.png"))


if __name__ == "__main__":
    main(*sys.argv[1:2])
