"""Figures as bytes and files; the same figure gives the same bytes."""

import io
from pathlib import Path
from typing import Final

import matplotlib
from matplotlib.figure import Figure

from credo.posterior.files import write_atomically

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
