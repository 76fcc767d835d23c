"""The one table, as plain text, Markdown or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HEADERS = ("", "/ Adam", "quartiles", "ms", "peak MB", "Σg² error")
WRONG = 1e-6  # relative, in float64


@dataclass
class Row:
    """One contender on one case. `problem` is why there are no numbers; `error` is that of its Σg²."""

    case: str
    contender: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    milliseconds: float | None = None
    megabytes: float | None = None
    error: float | None = None
    rounds: int = 0
    problem: str | None = None

    def cells(self) -> tuple[str, ...]:
        if self.problem is not None:
            return (self.contender, self.problem)
        spread = "" if self.low is None else f"{self.low:.2f}–{self.high:.2f}"
        numbers = (
            number(self.ratio, ".2f"),
            spread,
            number(self.milliseconds, ".2f"),
            number(self.megabytes, ".0f"),
        )
        return (self.contender, *numbers, self.verdict())

    def verdict(self) -> str:
        if self.error is None:
            return ""
        if self.error != self.error:
            return "unchecked"
        return f"{self.error:.0e}" if self.error <= WRONG else f"WRONG {self.error:.0e}"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def plain_text(rows: Sequence[Row]) -> str:
    full = [HEADERS, *(row.cells() for row in rows if row.problem is None)]
    widths = [max(len(cells[i]) for cells in full) for i in range(len(HEADERS))]
    widths[0] = max(len(row.contender) for row in rows)
    lines = [aligned(HEADERS, widths)]
    for case, members in by_case(rows):
        lines += ["", case, *(aligned(row.cells(), widths) for row in members)]
    return "\n".join(lines)


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) == 2:  # a reason takes the place of all numbers
        return f"  {cells[0]:<{widths[0]}}  {cells[1]}"
    numbers = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return f"  {cells[0]:<{widths[0]}}  " + "  ".join(numbers)


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| |" + "|".join(f" {header} " for header in HEADERS[1:]) + "|", "|---" + "|---:" * 5 + "|"]
    for case, members in by_case(rows):
        lines.append(f"| **{case}** |" + " |" * 5)
        for row in members:
            cells = row.cells()
            lines.append("| " + " | ".join((*cells, *[""] * (len(HEADERS) - len(cells)))) + " |")
    return "\n".join(lines)


def by_case(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for case in dict.fromkeys(row.case for row in rows):
        yield case, [row for row in rows if row.case == case]


def write_json(path: Path, machine: dict[str, object], rows: Sequence[Row]) -> None:
    path.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
