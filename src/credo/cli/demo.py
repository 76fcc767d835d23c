"""`credo demo`: the paper's claim on handwritten digits, in about a minute."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from credo.cli.exits import OK
from credo.cli.launch import require_one_process
from credo.experiments import report
from credo.experiments.names import known
from credo.experiments.recipe import Recipe, Row
from credo.experiments.recipes import recipe
from credo.experiments.results import Result
from credo.experiments.run import run, seed_list, trainings
from credo.experiments.watchers import Watcher

SAID = """\
The digits 0 to 7 are learnt, 8 and 9 never shown. The same network, data and epochs for every method.
[bold]NLL[/bold], [bold]ECE[/bold]: lower is better; how honest the probabilities are.
[bold]AUROC[/bold]: higher is better; whether wrong answers come with less confidence.
[bold]OOD AUROC[/bold], [bold]FPR95[/bold]: how well doubt tells the unseen digits from the known ones.
"""


def demo(out: Path, methods: Sequence[str], seeds: int, epochs: int | None) -> int:
    require_one_process("credo demo")
    shown, console, start = recipe("digits"), Console(highlight=False), time.perf_counter()
    digits = replace(shown, rows=(*shown.rows, *others(shown)))
    names = [row.name for row in digits.rows]
    rows = [known("method", name, names) for name in methods or [row.name for row in shown.rows]]
    overrides: dict[str, object] = {} if epochs is None else {"epochs": epochs}
    plan, numbers = (
        trainings(digits, "cpu", rows, overrides),
        seed_list(seeds),
    )  # wrong ones raise before anything is drawn
    with single_thread(), MethodBars(Console(stderr=True), list(plan), len(numbers)) as bars:
        results = _train(digits, out, list(plan), numbers, overrides, bars)
    report.terminal(console, report.tables(results), notes=False)
    console.print(SAID)
    written = report.write(out, results)
    picture = [path for path in written if path.suffix == ".png" and "overview" in path.name]
    for name, path in zip(("report", "picture"), [written[0], *picture], strict=False):
        console.print(f"[bold]{name}[/bold]  {path}", soft_wrap=True)
    console.print(f"[dim]{time.perf_counter() - start:.0f} seconds[/dim]")
    return OK


def others(shown: Recipe) -> list[Row]:
    """The methods that the demonstration leaves out unless asked for, on its network and its data."""
    own, base = {row.name for row in shown.rows}, shown.rows[0].cpu
    rows = [row for row in recipe("methods-digits").rows if row.name not in own and row.cpu is not None]
    assert base is not None
    return [
        replace(row, cpu=replace(base, method=row.cpu.method, settings=row.cpu.settings))
        for row in rows
        if row.cpu is not None
    ]


def _train(
    digits: Recipe,
    out: Path,
    rows: list[str],
    seeds: list[int],
    overrides: Mapping[str, object],
    bars: "MethodBars",
) -> list[Result]:
    """Seed by seed, so that the methods advance side by side; always afresh."""
    results = []
    for seed in seeds:
        for row in rows:
            bars.turn(row)
            results += run(
                digits,
                only=[row],
                seeds=[seed],
                out=out,
                overrides=overrides,
                resume=False,
                watcher=lambda title, folder: bars,
            )
    return results


@contextmanager
def single_thread() -> Iterator[None]:
    """Matrices this small are slower on two threads; and the numbers are the same for any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@final
class MethodBars(Watcher):
    """A bar for each method, over all its seeds."""

    def __init__(self, console: Console, rows: Sequence[str], seeds: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[scores]}"),
            console=console,
        )
        self._seeds, self._done, self._steps = seeds, dict.fromkeys(rows, 0), 0
        self._tasks: dict[str, TaskID] = {
            row: self._progress.add_task(row, start=False, total=None, scores="") for row in rows
        }
        self._row = rows[0] if rows else ""

    def __enter__(self) -> "MethodBars":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def turn(self, row: str) -> None:
        """The next run is one of this row."""
        self._row = row

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        self._steps = epochs * steps_per_epoch
        self._progress.start_task(self._tasks[self._row])
        self._progress.update(self._tasks[self._row], total=self._steps * self._seeds)

    def stepped(self, step: int) -> None:
        done = self._done[self._row] * self._steps + step
        self._progress.update(self._tasks[self._row], completed=done)

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        words = f"accuracy {row['accuracy']:.3f}  NLL {row['nll']:.3f}"
        self._progress.update(self._tasks[self._row], scores=words)

    def ended(self) -> None:
        self._done[self._row] += 1
