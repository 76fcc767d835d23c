"""Tables and figures as one HTML page that needs nothing else: no font, no address outside itself.

Its one script sorts the tables; without it the page is complete.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from credo.experiments import figures
from credo.experiments.names import plain_name
from credo.experiments.page_style import PAGE_STYLE, SORT_SCRIPT
from credo.experiments.recipes import RECIPES
from credo.experiments.report.render import markdown
from credo.experiments.report.tables import PUBLISHED, Cell, Line, Measure, Table, heading, tables
from credo.experiments.results import Result
from credo.posterior.files import write_atomically


@dataclass(frozen=True)
class Picture:
    """A figure of a table: its recipe and size say which."""

    recipe: str
    size: str
    name: str  # of its files, without suffix
    title: str
    caption: str
    svg: bytes


def html(tables: Sequence[Table], pictures: Sequence[Picture] = (), title: str = "credo report") -> str:
    """The page; every figure follows its table."""
    parts = [section(table, pictures) for table in tables]
    contents = "".join(f'<li><a href="#{anchor(t)}">{escape(heading(t))}</a></li>' for t in tables)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"{LEGEND}\n<nav><ul>{contents}</ul></nav>\n{''.join(parts)}</main>\n<script>{SORT_SCRIPT}</script>\n</body>\n</html>\n"
    )


LEGEND = (
    "<p>Mean ± standard deviation over seeds. <strong>Bold</strong>: the best of our means. "
    "Lines marked <em>paper</em> are the published numbers. Accuracies are in per cent, NLL in nats; "
    "lower is better for NLL, Brier, ECE and FPR95, higher for accuracy and AUROC. A click on a heading sorts.</p>"
)


def section(table: Table, pictures: Sequence[Picture]) -> str:
    own = [p for p in pictures if (p.recipe, p.size) == (table.recipe, table.size)]
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<section id="{anchor(table)}">\n<h2>{escape(heading(table))}</h2>\n{grid(table)}'
        f"{notes}{settings(table)}{''.join(figure(picture) for picture in own)}</section>\n"
    )


def anchor(table: Table) -> str:
    return escape(f"{table.recipe}-{table.size}", quote=True)


def grid(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(measure.heading)}</th>' for measure in table.measures)
    body = "".join(line_of(line, table.measures) for line in table.lines)
    return (
        '<div class="wide"><table>\n<thead><tr><th scope="col">method</th><th scope="col"></th>'
        f"{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def line_of(line: Line, measures: Sequence[Measure]) -> str:
    published = line.who == PUBLISHED
    name = "" if published else escape(line.label)
    who = escape(f"{line.who} {line.remark}".strip())
    cells = "".join(f"<td>{text(line.cells.get(measure.key), measure)}</td>" for measure in measures)
    kind = "paper" if published else "ours"
    return f'<tr class="{kind}"><th scope="row">{name}</th><td class="who">{who}</td>{cells}</tr>\n'


def text(cell: Cell | None, measure: Measure) -> str:
    written = "" if cell is None else escape(measure.text(cell.mean, cell.sd))
    return f"<strong>{written}</strong>" if cell is not None and cell.best else written


def settings(table: Table) -> str:
    """How each of our rows was trained, folded away."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(how)}</dd>" for name, how in table.settings)
    return f"<details><summary>Settings</summary><dl>{items}</dl></details>\n" if items else ""


def figure(picture: Picture) -> str:
    """As an image, so that the names inside two pictures cannot meet."""
    data = base64.b64encode(picture.svg).decode()
    return (
        f'<figure><img alt="{escape(picture.title, quote=True)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption><strong>{escape(picture.title)}.</strong> {escape(picture.caption)}</figcaption></figure>\n"
    )


# The report as files: report.md, report.html, and every figure as PNG and SVG

# For a recipe that names none, or is not ours
USUAL = ("training_curves", "calibration_curves", "entropy_histograms")

USUAL_OF_STREAMS = ("average_accuracy",)


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


def write_table(folder: Path, results: Sequence[Result]) -> str:
    """Of one recipe and size: table.md, and each figure as PNG and SVG; returns the table."""
    text = markdown(tables(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.md", text.encode())
    for kind in RECIPES[results[0].recipe].figures if results[0].recipe in RECIPES else USUAL_OF_STREAMS:
        figure = figures.draw(kind, results)
        if figure is not None:
            figures.save(figure, folder / kind.replace("_", "-"))
    return text


def pictures(results: Sequence[Result], *, data_root: Path | str | None = None) -> list[Picture]:
    """The figures that the results' recipes ask for, those that the results have what it takes to draw."""
    return [picture for picture, _ in draw_all(results, data_root)]


def draw_all(results: Sequence[Result], data_root: Path | str | None) -> list[tuple[Picture, figures.Figure]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.recipe, result.size), []).append(result)
    found = []
    for (name, size), group in groups.items():
        # It names files
        stem = plain_name("recipe and size in config.json:", f"{name or 'run'}-{size or 'own'}")
        wanted = RECIPES[name].figures if name in RECIPES else ()
        for kind in wanted or (USUAL_OF_STREAMS if group[0].is_stream else USUAL):
            figure = figures.draw(kind, group, data_root=data_root)
            if figure is not None:
                title, caption = figures.CAPTIONS[kind]
                svg = figures.svg(figure)
                found.append((Picture(name, size, f"{stem}-{kind}", title, caption, svg), figure))
    return found
