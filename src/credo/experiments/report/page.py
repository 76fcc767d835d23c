"""Tables and figures as one HTML page that needs nothing else: no script, no font, no address outside itself."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from credo.experiments.report.aggregate import Cell
from credo.experiments.report.measures import Measure
from credo.experiments.report.tables import PUBLISHED, Line, Table
from credo.experiments.report.words import heading
from credo.experiments.sheet import SHEET


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
        f"<title>{escape(title)}</title>\n<style>{SHEET}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"{LEGEND}\n<nav><ul>{contents}</ul></nav>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


LEGEND = (
    "<p>Mean ± standard deviation over seeds. <strong>Bold</strong>: the best of our means. "
    "Lines marked <em>paper</em> are the published numbers. Accuracies are in per cent, NLL in nats; "
    "lower is better for NLL, Brier, ECE and FPR95, higher for accuracy and AUROC.</p>"
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
