"""`credo list`: recipes, and one recipe in full."""

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from credo import data
from credo.cli.exits import OK
from credo.experiments.continual_recipe import ContinualRecipe
from credo.experiments.continual_runs import CONTINUAL
from credo.experiments.methods import METHODS
from credo.experiments.networks import NETWORKS
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import RECIPES, recipe


def show(name: str | None) -> int:
    console = Console(highlight=False)
    if name in CONTINUAL:
        _stream(console, CONTINUAL[name])
    elif name is not None:
        _one(console, recipe(name))
    else:
        _all(console)
    return OK


def _all(console: Console) -> None:
    table = Table("recipe", "what it is", "rows", "sizes", box=None, pad_edge=False, header_style="bold")
    for entry in RECIPES.values():
        table.add_row(entry.name, escape(entry.title), str(len(entry.rows)), " ".join(_sizes(entry)))
    for stream in CONTINUAL.values():
        table.add_row(stream.name, escape(stream.title), str(len(stream.rows)), "cpu paper")
    console.print(table)
    for kind, names in (("methods", METHODS), ("models", NETWORKS), ("data sets", data.names())):
        console.print(f"\n[bold]{kind}[/bold]  {', '.join(names)}", soft_wrap=True)
    console.print("\n[dim]credo list RECIPE shows its rows; credo run RECIPE --only ROW trains one[/dim]")


def _sizes(entry: Recipe) -> list[str]:
    return [size for size in ("cpu", "paper") if any(getattr(row, size) is not None for row in entry.rows)]


def _one(console: Console, entry: Recipe) -> None:
    console.print(f"[bold]{escape(entry.title)}[/bold] ({escape(entry.source)})")
    if entry.note:
        console.print(escape(entry.note))
    for row in entry.rows:
        console.print(f"\n[bold]{escape(row.name)}[/bold]")
        for size in ("cpu", "paper"):
            training: Training | None = getattr(row, size)
            if training is not None:
                console.print(f"  {size + ':':8}{escape(_training(training))}", soft_wrap=True)
        if row.published:
            console.print(f"  paper's result: {escape(_published(row))}", soft_wrap=True)


def _stream(console: Console, entry: ContinualRecipe) -> None:
    console.print(f"[bold]{escape(entry.title)}[/bold] ({escape(entry.source)})")
    for row in entry.rows:
        console.print(f"\n[bold]{escape(row.name)}[/bold]")
        for size in ("cpu", "paper"):
            chosen = row.cpu if size == "cpu" else row.paper
            what = f"{entry.tasks[size]} tasks, {chosen.epochs} epochs each of batch {chosen.batch_size}"
            console.print(
                f"  {size + ':':8}{escape(what)}; {escape(_pairs(chosen.settings))}", soft_wrap=True
            )


def _training(training: Training) -> str:
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
