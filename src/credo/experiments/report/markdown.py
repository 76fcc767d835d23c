"""Tables as Markdown, to be pasted into documents."""

import html
import re
from collections.abc import Iterable

from credo.experiments.report.aggregate import Cell
from credo.experiments.report.measures import Measure
from credo.experiments.report.tables import Line, Table
from credo.experiments.report.words import heading

SPECIAL = re.compile(r"([\\`*_{}\[\]#|~])")


def markdown(tables: list[Table]) -> str:
    """All tables, one after the other; the best of our means in bold."""
    return "\n".join(section(table) for table in tables)


def section(table: Table) -> str:
    columns = ["method", "", *(measure.heading for measure in table.measures)]
    rule = ["---", "---", *("---:" for _ in table.measures)]
    grid = [line_of(escape(column) for column in columns), line_of(rule)]
    grid += [line_of(cells(line, table.measures)) for line in table.lines]
    notes = [f"{escape(note)}\n" for note in table.notes]
    return "\n".join([f"### {escape(heading(table))}\n", *grid, "", *notes])


def cells(line: Line, measures: tuple[Measure, ...]) -> list[str]:
    first = [escape(line.label), escape(f"{line.who} {line.remark}".strip())]
    return first + [text(line.cells.get(measure.key), measure) for measure in measures]


def text(cell: Cell | None, measure: Measure) -> str:
    written = "" if cell is None else measure.text(cell.mean, cell.sd)
    return f"**{written}**" if cell is not None and cell.best else written


def line_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Names stay text: no markup, no HTML, no line that ends the table."""
    return SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))
