"""The one table, as plain text, Markdown or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HEADERS = ("", "/ Adam", "quartiles", "ms", "peak MB", "Σg² error")
WIDTHS = (29, 6, 11, 7, 7, 11)
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


def heading() -> str:
    return aligned(HEADERS)


def block(case: str, rows: Sequence[Row]) -> str:
    """One case of the plain table, which can be printed before the next case is measured."""
    return "\n".join(["", case, *(aligned(row.cells()) for row in rows)])


def aligned(cells: Sequence[str]) -> str:
    first, *others = cells
    if len(others) == 1:  # a reason takes the place of all numbers
        return f"  {first:<{WIDTHS[0]}}  {others[0]}"
    numbers = (f"{cell:>{width}}" for cell, width in zip(others, WIDTHS[1:], strict=True))
    return f"  {first:<{WIDTHS[0]}}  " + "  ".join(numbers)


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
