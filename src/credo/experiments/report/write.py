"""The report as files: report.md, report.html, and every figure as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path

from credo.experiments import figures
from credo.experiments.names import plain_name
from credo.experiments.recipes import RECIPES
from credo.experiments.report.markdown import markdown
from credo.experiments.report.page import Picture, html
from credo.experiments.report.tables import tables
from credo.experiments.results import Result
from credo.posterior.files import write_atomically

USUAL = (
    "training_curves",
    "calibration_curves",
    "entropy_histograms",
)  # for a recipe that names none, or is not ours


def write(out: Path | str, results: Sequence[Result], *, data_root: Path | str | None = None) -> list[Path]:
    """Writes report.md, report.html and figures/ into `out`; returns the paths, the page first.

    `data_root` is where the data lie, for the figures that show inputs; without the data these are left out.
    """
    folder = Path(out)
    drawn = list(draw_all(results, data_root))
    all_tables = tables(results)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pages = [folder / "report.html", folder / "report.md"]
    pictures = [picture for picture, _ in drawn]
    write_atomically(pages[0], html(all_tables, pictures).encode())
    write_atomically(pages[1], markdown(all_tables).encode())
    for picture, figure in drawn:
        stem = folder / "figures" / picture.name
        pages += figures.save(figure, stem, kinds=("png",))
        write_atomically(stem.with_name(f"{picture.name}.svg"), picture.svg)
        pages.append(stem.with_name(f"{picture.name}.svg"))
    return pages


def pictures(results: Sequence[Result], *, data_root: Path | str | None = None) -> list[Picture]:
    """The figures that the results' recipes ask for, those that the results have what it takes to draw."""
    return [picture for picture, _ in draw_all(results, data_root)]


def draw_all(results: Sequence[Result], data_root: Path | str | None) -> list[tuple[Picture, figures.Figure]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.recipe, result.size), []).append(result)
    found = []
    for (name, size), group in groups.items():
        stem = plain_name(
            "recipe and size in config.json:", f"{name or 'run'}-{size or 'own'}"
        )  # it names files
        wanted = RECIPES[name].figures if name in RECIPES else ()
        for kind in wanted or USUAL:
            figure = figures.draw(kind, group, data_root=data_root)
            if figure is not None:
                title, caption = figures.CAPTIONS[kind]
                svg = figures.svg(figure)
                found.append((Picture(name, size, f"{stem}-{kind}", title, caption, svg), figure))
    return found
