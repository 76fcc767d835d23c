"""`credo data fetch` and `credo data check`."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from credo import data
from credo.cli.exits import BAD_DATA, OK


def fetch(name: str, folder: Path | None) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars: dict[str, TaskID] = {}

        def received(file: str, size: int, total: int) -> None:
            bar = bars.get(file)
            bar = bars.setdefault(file, progress.add_task(file)) if bar is None else bar
            progress.update(bar, completed=size, total=total)

        report = data.fetch(name, folder, progress=received)
    return told(report)


def check(name: str, folder: Path | None) -> int:
    return told(data.check(name, folder))


def told(report: data.CheckReport) -> int:
    """A good report on stdout; a bad one on stderr, one line a problem."""
    if report.ok:
        print(report)
        return OK
    for line in str(report).splitlines():
        print(f"credo: {line}", file=sys.stderr)
    return BAD_DATA
