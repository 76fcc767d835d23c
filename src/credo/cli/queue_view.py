"""What people see of a queue: lines for what happens, a table of what runs, and how long it will take."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from credo.errors import CredoError
from credo.experiments.lock import living_holder
from credo.experiments.queue_file import Job
from credo.experiments.queue_state import RunStatus, status_of
from credo.experiments.results import load_result
from credo.experiments.run_folder import RunFolder, read_log

SHOWN: Final = ("accuracy", "rmse", "nll", "ece")
REFRESH: Final = 2.0  # seconds
QUIET: Final = 300.0  # seconds between two lines where there is no terminal
WIDTH: Final = 150


class View:
    """A living table on a terminal; elsewhere (a log file) lines alone."""

    def __init__(self, out: Path, results: Path | None) -> None:
        self._out, self._results = out, results
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = 0.0

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%F %T')} {text}", markup=False, soft_wrap=True)

    def finished(self, job: Job) -> None:
        try:
            metrics = load_result(job.folder(self._out)).metrics
        except (CredoError, OSError) as error:
            self.say(f"{job.title}: finished, and cannot be read: {error}")
            return
        self.say(f"{job.title}: finished: {scores(metrics)}")

    def show(
        self, runs: Sequence[Job], running: Sequence[str], slots: int, failed: Mapping[str, str]
    ) -> None:
        terminal = self._console.is_terminal
        if time.monotonic() - self._shown < (REFRESH if terminal else QUIET):
            return
        self._shown = time.monotonic()
        found = statuses(runs, self._out, self._results)
        summary = summary_of(runs, found, slots, len(failed))
        if not terminal:
            self.say(summary)
            return
        table = table_of(
            [(job, s) for job, s in zip(runs, found, strict=True) if job.title in running], self._out
        )
        self._live.update(Group(table, Text(summary)), refresh=True)


def show_status(
    console: Console, runs: Sequence[Job], out: Path, results: Path | None, lock: Path, slots: int
) -> None:
    """All runs in the order of the queue."""
    if not console.is_terminal:
        console.width = WIDTH
    found = statuses(runs, out, results)
    console.print(table_of(list(zip(runs, found, strict=True)), out))
    console.print(summary_of(runs, found, slots, sum(s.state == "failed" for s in found)), markup=False)
    pid = living_holder(lock)
    console.print("nobody works on it" if pid is None else f"process {pid} works on it", markup=False)
    for job, one in zip(runs, found, strict=True):
        if one.state == "failed":
            console.print(f"{job.title}: {one.message}", markup=False, soft_wrap=True)


def statuses(runs: Sequence[Job], out: Path, results: Path | None = None) -> list[RunStatus]:
    return [status_of(job.folder(out), partial(job.is_recorded, results)) for job in runs]


def table_of(rows: Sequence[tuple[Job, RunStatus]], out: Path) -> Table:
    heads = ("priority", "recipe", "size", "row", "seed", "state", "epochs", "remaining", "scores so far")
    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for job, one in rows:
        left = None if one.whole is None else one.whole * (1 - one.share)
        done = f"{int(one.share * job.training.epochs)}/{job.training.epochs}"
        cells = (str(job.priority), job.recipe, job.size, job.label, str(job.seed), one.state, done)
        remaining = "" if one.done else duration(left)
        table.add_row(*map(escape, cells), remaining, latest(job.folder(out)))
    return table


def latest(folder: Path) -> str:
    """Of the last epoch that is logged."""
    try:
        rows = read_log(RunFolder(folder).log)
    except (CredoError, OSError, UnicodeDecodeError):
        return ""
    return scores(rows[-1]) if rows else ""


def scores(found: Mapping[str, Any]) -> str:
    known = [(name, found[name]) for name in SHOWN if isinstance(found.get(name), float)]
    return ", ".join(f"{name} {value:.4f}" for name, value in known)


def summary_of(runs: Sequence[Job], found: Sequence[RunStatus], slots: int, failed: int) -> str:
    done = sum(one.done for one in found)
    text = f"{done} of {len(runs)} finished, {failed} failed"
    if done == len(runs):
        return text
    seconds, unknown = remaining(runs, found)
    if unknown and not seconds:
        return f"{text}; how long the others take is not known before their first epoch"
    rest = f", and {unknown} whose time is not known yet" if unknown else ""
    return f"{text}; about {duration(seconds / slots)} to go{rest}"


def remaining(runs: Sequence[Job], found: Sequence[RunStatus]) -> tuple[float, int]:
    """Seconds of work that are left, and how many runs they leave out.

    A run that has not begun takes as long as others of its row, or else of its recipe and size.
    """
    known: dict[tuple[str, ...], list[float]] = {}
    for job, one in zip(runs, found, strict=True):
        if one.whole is not None:
            for key in _likeness(job):
                known.setdefault(key, []).append(one.whole / job.training.epochs)
    total, unknown = 0.0, 0
    for job, one in zip(runs, found, strict=True):
        like = next((known[key] for key in _likeness(job) if key in known), None)
        if one.done or job.ensemble:  # an ensemble trains nothing
            continue
        if like is None:
            unknown += 1
            continue
        whole = one.whole if one.whole is not None else sum(like) / len(like) * job.training.epochs
        total += whole * (1 - one.share)
    return total, unknown


def _likeness(job: Job) -> tuple[tuple[str, ...], ...]:
    """What runs have in common that take equally long, the nearest first."""
    place = (job.recipe, job.size)
    return (*place, job.row, job.label), (*place, job.row), place


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d}"
