"""Histograms of the predictive entropy, familiar inputs against unfamiliar ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from credo.experiments.figures.grouping import Array, by_row
from credo.experiments.figures.style import FAMILIAR, INK, UNFAMILIAR, legend_below, new_figure, tidy
from credo.experiments.labels import label, set_label
from credo.experiments.results import Result

BINS: Final = 30


class Entropies(NamedTuple):
    """In nats, of all seeds together; `classes` sets the largest possible, log C."""

    familiar: Array
    unfamiliar: dict[str, Array]
    classes: int


def entropies_of(results: Sequence[Result]) -> Entropies | None:
    """None where a run kept no predictions on unfamiliar data."""
    kept = [result.predictions() for result in results]
    names = unfamiliar_sets(kept[0], list(results[0].training.get("ood", ())))
    if not names:
        return None
    return Entropies(
        joined(kept, "test.entropy"),
        {name: joined(kept, f"ood.{name}.entropy") for name in names},
        kept[0]["test.probs"].shape[1],
    )


def unfamiliar_sets(predictions: Mapping[str, Tensor], order: list[str]) -> list[str]:
    """Names of the unfamiliar data: classes held out first, then as the recipe lists them."""
    keys = [key for key in predictions if key.startswith("ood.") and key.endswith(".entropy")]
    names = [key.removeprefix("ood.").removesuffix(".entropy") for key in keys]
    return sorted(names, key=lambda name: (order.index(name) if name in order else -1, name))


def joined(kept: Sequence[Mapping[str, Tensor]], key: str) -> Array:
    return numpy.concatenate([predictions[key].double().numpy() for predictions in kept])


def entropy_histograms(results: Sequence[Result]) -> Figure | None:
    """A panel for each row and unfamiliar data set; rows side by side where there is a single set."""
    groups = by_row(results)
    found = {row: entropies_of(group) for row, group in groups.items()}
    shown = {row: entropies for row, entropies in found.items() if entropies is not None}
    if not shown:
        return None
    names = list(next(iter(shown.values())).unfamiliar)
    across = len(names) == 1
    down, right = (1, len(shown)) if across else (len(shown), len(names))
    figure = new_figure(max(2.9 * right, 3.6), 2.3 * down + 0.7)
    grid = figure.subplots(down, right, squeeze=False, sharex=True, sharey=True if across else "row")
    panels = grid.T if across else grid
    for k, row in enumerate(shown):
        for axes, name in zip(panels[k], names, strict=True):
            draw_histogram(axes, shown[row], name)
            tidy(axes, title=f"{label(row)}: {set_label(name)}\n{detection(groups[row], name)}")
    for axes in grid[-1]:
        axes.set_xlabel("predictive entropy (nats)", fontsize=9, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("density", fontsize=9, color=INK)
    legend_below(figure, grid[0, 0])
    return figure


def detection(results: Sequence[Result], name: str) -> str:
    """How well the two are told apart, mean over the seeds."""
    auroc, fpr = (
        numpy.mean([r.metrics.get(f"{m}.{name}", math.nan) for r in results])
        for m in ("ood_auroc", "ood_fpr95")
    )
    return f"AUROC {auroc:.3f}, FPR95 {fpr:.3f}"


def draw_histogram(axes: Axes, entropies: Entropies, name: str) -> None:
    """Both densities over 0 … log C, their means as lines."""
    edges = numpy.linspace(0, math.log(entropies.classes), BINS + 1).tolist()
    shown = {
        "familiar": (entropies.familiar, FAMILIAR),
        "unfamiliar": (entropies.unfamiliar[name], UNFAMILIAR),
    }
    for kind, (values, colour) in shown.items():
        inside = numpy.clip(values, edges[0], edges[-1])  # rounding may reach past log C
        axes.hist(inside, edges, density=True, color=colour, alpha=0.3, label=kind)
        axes.hist(inside, edges, density=True, color=colour, histtype="step", linewidth=1.2)
        axes.axvline(float(values.mean()), color=colour, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_xlim(edges[0], edges[-1])
