"""What there is: `credo info`, `credo list`, `credo data fetch` and `credo data check`."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from credo import data, kernels
from credo.cli.app import VERSION
from credo.cli.exits import BAD_DATA, OK
from credo.experiments.build import NETWORKS
from credo.experiments.methods import METHODS
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import RECIPES, recipe

PACKAGES = (
    "triton",
    "numpy",
    "safetensors",
    "rich",
    "tyro",
    "matplotlib",
    "tensorboard",
    "scikit-learn",
    "scipy",
    "pillow",
)


def show_info() -> int:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts():
        table.add_row(f"[bold]{name}[/bold]", value)
    Console(highlight=False).print(table)
    return OK


def facts() -> Iterator[tuple[str, str]]:
    status = kernels.status()
    yield "credo", VERSION
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    running = f"C++ ({status.instruction_set})" if status.enabled else "pure torch"
    yield "kernels", f"{running}; {status.reason}"
    yield "on a GPU", status.on_the_gpu
    yield "devices", ", ".join(_devices())
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _devices() -> Iterator[str]:
    yield "cpu"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if torch.backends.mps.is_available():
        yield "mps"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def show_recipes(name: str | None) -> int:
    console = Console(highlight=False)
    if name is not None:
        _one(console, recipe(name))
    else:
        _all(console)
    return OK


def _all(console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)  # to be copied
    for name in ("what it is", "rows", "sizes"):
        table.add_column(name)
    for entry in RECIPES.values():
        table.add_row(entry.name, escape(entry.title), str(len(entry.rows)), " ".join(_sizes(entry)))
    console.print(table)
    for kind, names in (("methods", METHODS), ("models", NETWORKS), ("data sets", data.names())):
        console.print(f"\n[bold]{kind}[/bold]  {', '.join(names)}", soft_wrap=True)
    console.print("\n[dim]credo list RECIPE shows its rows; credo run RECIPE --only ROW trains one[/dim]")


def _sizes(entry: Recipe) -> list[str]:
    return [size for size in ("cpu", "paper") if any(row.training(size) is not None for row in entry.rows)]


def _one(console: Console, entry: Recipe) -> None:
    console.print(f"[bold]{escape(entry.title)}[/bold] ({escape(entry.source)})")
    if entry.note:
        console.print(escape(entry.note))
    for row in entry.rows:
        console.print(f"\n[bold]{escape(row.name)}[/bold]")
        for size in ("cpu", "paper"):
            training = row.training(size)
            if training is not None:
                console.print(f"  {size + ':':8}{escape(_training(training))}", soft_wrap=True)
        if row.published:
            console.print(f"  paper's result: {escape(_published(row))}", soft_wrap=True)


def _training(training: Training) -> str:
    if training.tasks is not None:
        epochs = f"{training.epochs} epochs each of batch {training.batch_size}"
        return f"{training.tasks.count} tasks, {epochs}; {_pairs(training.settings)}"
    model = training.model if isinstance(training.model, str) else "own model"
    source = training.data if isinstance(training.data, str) else "own data"
    parts = [
        f"{training.method} on {model}, {source}",
        f"{training.epochs} epochs of batch {training.batch_size}",
    ]
    parts += [_pairs(mapping) for mapping in (training.settings, training.model_options) if mapping]
    return "; ".join(parts)


def _pairs(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in mapping.items())


def _published(row: Row) -> str:
    return ", ".join(
        f"{name} {mean:g}" + (f" ± {deviation:g}" if deviation is not None else "")
        for name, (mean, deviation) in row.published.items()
    )


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
