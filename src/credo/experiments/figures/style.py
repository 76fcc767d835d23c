"""How all figures look: one colour a method, safe for colour-blind readers, and a second sign beside every colour."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from credo.experiments.labels import label

# Okabe and Ito's palette; wine and indigo are Tol's
COLOURS: Final = {
    "vogn": "#D55E00",
    "adam": "#0072B2",
    "mc-dropout": "#009E73",
    "sgd": "#555555",
    "ogn": "#E69F00",
    "bbb": "#CC79A7",
    "kfac": "#56B4E9",
    "noisy-kfac": "#882255",
    "ivon": "#332288",
    "vogn-released": "#8C4A14",
}
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
INK: Final = "#1b1f24"
SOFT: Final = "#6b7480"
FAMILIAR: Final = "#7B8FA1"  # neither is a method's colour
UNFAMILIAR: Final = "#7B3294"
SCALE: Final = "viridis"  # for rows that differ in a number and not in the method


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str


def looks(rows: Sequence[str]) -> dict[str, Look]:
    """A look for every row: its method's colour where it is named after one, else a step of an ordered scale."""
    others = [row for row in rows if row not in COLOURS]
    steps = matplotlib.colormaps[SCALE]
    ordered = {
        row: matplotlib.colors.to_hex(steps(0.05 + 0.8 * k / max(len(others) - 1, 1)))
        for k, row in enumerate(others)
    }
    return {
        row: Look(label(row), COLOURS.get(row) or ordered[row], MARKERS[k % len(MARKERS)])
        for k, row in enumerate(rows)
    }


def new_figure(width: float, height: float) -> Figure:
    """In inches; no pyplot, so nothing stays open and nothing is shared."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    return Figure(figsize=(width, height), dpi=160, layout=layout, facecolor="white")


def tidy(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> Axes:
    """Title and labels, light grid, no box."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=SOFT, length=3)
    axes.grid(True, linewidth=0.5, color="#e3e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#aab2bb")
    return axes


def dashed_for_training(axes: Axes) -> None:
    """Says in the legend what a dashed line is."""
    axes.plot([], [], color=SOFT, linewidth=1, linestyle="--", label="training data")


def legend_below(figure: Figure, axes: Axes, columns: int = 6) -> None:
    """One legend for all panels, where it covers no curve."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        fontsize=8,
        frameon=False,
    )
