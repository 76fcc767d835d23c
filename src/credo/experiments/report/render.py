"""Tables as text: Markdown, to be pasted into documents, and the terminal."""

import html
import re
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from credo.experiments.report.tables import OOD, PUBLISHED, Cell, Line, Measure, Table, heading

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


# In the terminal, with rich

# Characters that the first two columns take at least, and a column with the sd below the mean
METHOD, NARROW = 22, 8
NAMES, CELL = 30, 16  # characters that the first two columns take, and a column of mean ± sd


def terminal(console: Console, tables: Sequence[Table], *, notes: bool = True) -> None:
    """Prints every table; the paper's lines are dim, the best of ours bold."""
    for table in tables:
        console.print(Text(heading(table), style="bold"))
        for measures in in_parts(table.measures):
            for part in fitting(measures, console.width):
                console.print(grid(table.lines, part, console.width))
        for note in table.notes if notes else ():
            console.print(Text(note, style="dim"))
        console.print()


def in_parts(measures: Sequence[Measure]) -> list[list[Measure]]:
    """The essential columns; several unfamiliar data sets get a table of their own below."""
    shown = [measure for measure in measures if measure.essential]
    unfamiliar = [measure for measure in shown if measure.key.partition(".")[0] in OOD]
    if len(unfamiliar) <= len(OOD):
        return [shown]
    return [[measure for measure in shown if measure not in unfamiliar], unfamiliar]


def fitting(measures: Sequence[Measure], width: int) -> list[Sequence[Measure]]:
    """Columns that do not fit side by side, in tables of about as many each; rich would cut the last ones off."""
    most = max(1, (width - METHOD) // NARROW)
    parts = -(-len(measures) // most)
    size = -(-len(measures) // max(1, parts))
    return [measures[k : k + size] for k in range(0, len(measures), size)]


def grid(lines: Sequence[Line], measures: Sequence[Measure], width: int) -> RichTable:
    below = NAMES + CELL * len(measures) > width
    table = RichTable(header_style="bold", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("method", min_width=10)
    table.add_column("")
    for measure in measures:
        longest = max(len(word) for word in measure.heading.split())
        table.add_column(Text(measure.heading), justify="right", min_width=longest)
    for line in lines:
        if line.who == PUBLISHED and not any(measure.key in line.cells for measure in measures):
            continue
        cells = [styled(line.cells.get(measure.key), measure, below) for measure in measures]
        style = "dim" if line.who == PUBLISHED else ""
        table.add_row(Text(name(line)), Text(f"{line.who} {line.remark}".strip()), *cells, style=style)
    return table


def name(line: Line) -> str:
    """Said once for the two lines of a row."""
    return "" if line.who == PUBLISHED else line.label


def styled(cell: Cell | None, measure: Measure, below: bool) -> Text:
    """The spread goes below the mean where there is no room beside it."""
    if cell is None:
        return Text("")
    written = measure.text(cell.mean, cell.sd)
    return Text(written.replace(" ± ", "\n±") if below else written, style="bold" if cell.best else "")
