"""How all figures look: one colour a method, safe for colour-blind readers, and a second sign beside every colour."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from credo.experiments.names import label
from credo.experiments.recipes import RECIPES
from credo.experiments.results import Result
from credo.posterior.files import write_atomically

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
class SeriesStyle:
    label: str
    colour: str
    marker: str


def looks(rows: Sequence[str]) -> dict[str, SeriesStyle]:
    """A look for every row: its method's colour where it is named after one, else a step of an ordered scale."""
    others = [row for row in rows if row not in COLOURS]
    steps = matplotlib.colormaps[SCALE]
    ordered = {
        row: matplotlib.colors.to_hex(steps(0.05 + 0.8 * k / max(len(others) - 1, 1)))
        for k, row in enumerate(others)
    }
    return {
        row: SeriesStyle(label(row), COLOURS.get(row) or ordered[row], MARKERS[k % len(MARKERS)])
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


# Results of one recipe and size, by row, and what several seeds have in common

Array = NDArray[numpy.float64]


def by_row(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Seeds together, rows in the recipe's order; rows that it does not know come last, as they were given."""
    recipe = RECIPES.get(results[0].recipe) if results else None
    order = [row.name for row in recipe.rows] if recipe else []
    found: dict[str, list[Result]] = {name: [] for name in order}
    for result in results:
        found.setdefault(result.row, []).append(result)
    return {row: group for row, group in found.items() if group}


def column(log: Sequence[Mapping[str, Any]], name: str) -> Array:
    """One number an epoch; NaN where it is missing or not a number."""
    values = [row.get(name) for row in log]
    return numpy.array([numpy.nan if value is None else float(value) for value in values])


def over_seeds(results: Sequence[Result], name: str) -> Array:
    """(seeds, epochs), as many epochs as all seeds have."""
    columns = [column(result.log, name) for result in results]
    epochs = min(len(values) for values in columns)
    return numpy.stack([values[:epochs] for values in columns])


# Figures as bytes and files; the same figure gives the same bytes

NO_DATE: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}, "png": {}}


def rendered(figure: Figure, kind: str) -> bytes:
    """`kind` is "png", "svg" or "pdf"."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "credo"}):  # else the names inside an SVG are drawn at random
        figure.savefig(buffer, format=kind, metadata=NO_DATE[kind])
    figure.set_layout_engine("none")  # it has found its places, and finding them is most of the work
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    return rendered(figure, "svg")


def save(figure: Figure, stem: Path | str, kinds: tuple[str, ...] = ("png", "svg")) -> list[Path]:
    """stem.png and stem.svg; their paths. "pdf" is the third kind."""
    paths = [Path(f"{stem}.{kind}") for kind in kinds]
    for path, kind in zip(paths, kinds, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, rendered(figure, kind))
    return paths
