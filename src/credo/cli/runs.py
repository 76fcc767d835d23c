"""`credo run` and `credo report`."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from credo.cli.exits import OK
from credo.cli.processes import device_of_rank, process_group
from credo.distributed import world
from credo.errors import InvalidValue
from credo.experiments import report as reports
from credo.experiments.config import load_recipe
from credo.experiments.continual_recipe import Size
from credo.experiments.continual_runs import CONTINUAL, run_stream
from credo.experiments.names import known, plain_name
from credo.experiments.overrides import parse_assignments
from credo.experiments.progress import ProgressBar, Several, TensorBoard, Watcher
from credo.experiments.recipe import Recipe
from credo.experiments.recipes import RECIPES
from credo.experiments.recipes import recipe as recipe_of
from credo.experiments.results import Result, load_results
from credo.experiments.run import run as run_recipe

SHOWN = ("accuracy", "rmse", "nll", "ece", "ood_auroc", "seconds_per_epoch")


def run(
    name: str,
    only: Iterable[str],
    size: str,
    assignments: Iterable[str],
    seeds: int,
    out: Path,
    data: Path | None,
    resume: bool,
    device: str,
    timeout: float,
    ensemble: int | None = None,
) -> int:
    device = device_of_rank(device)
    with process_group(timeout, device):
        if name in CONTINUAL:
            if ensemble is not None:
                raise InvalidValue(f"{name} is a stream of tasks, for which --ensemble is not there.")
            return _run_stream(name, only, size, assignments, seeds, out, data, resume)
        results = run_recipe(
            named_recipe(name),
            size=size,
            only=only,
            seeds=seeds,
            out=out,
            data_root=data,
            overrides=parse_assignments(assignments),
            resume=True if resume else "auto",
            watcher=_watcher,
            device=device,
            ensemble=ensemble,
        )
        if world().rank == 0:
            for result in results:
                print(f"{result.folder}: {_scores(result)}")
            print(f"compare with: credo report {out}")
        return OK


def _run_stream(
    name: str,
    only: Iterable[str],
    size: str,
    assignments: Iterable[str],
    seeds: int,
    out: Path,
    data: Path | None,
    resume: bool,
) -> int:
    """A stream of tasks: another loop and another table than a single task's."""
    if list(assignments) or resume:
        raise InvalidValue(f"{name} is a stream of tasks, for which --set and --resume are not there.")
    chosen: Size = "paper" if size == "paper" else "cpu"
    table = run_stream(CONTINUAL[name], size=chosen, only=only, seeds=seeds, out=out, data_root=data)
    if world().rank == 0:
        print(table)
        print(f"table and figure: {out / name / size}")
    return OK


def named_recipe(name: str) -> Recipe:
    """One of credo's by name; or the user's own, a file whose name ends in .toml."""
    if name.endswith(".toml"):
        return load_recipe(name)
    known("recipe", plain_name("recipe", name), [*RECIPES, *CONTINUAL])
    return recipe_of(name)


def report(out: Path, data: Path | None) -> int:
    if not out.is_dir():
        raise FileNotFoundError(f"there is no folder {out}; credo run RECIPE --out {out} makes one")
    results = load_results(out)
    if not results:
        raise InvalidValue(f"{out} holds no finished run; a run under way is shown when it has finished")
    reports.terminal(Console(highlight=False), reports.tables(results))
    for path in reports.write(out, results, data_root=data)[:2]:
        print(path)
    return OK


def _watcher(title: str, folder: Path) -> Watcher:
    bar = ProgressBar(Console(stderr=True))
    if find_spec("tensorboard") is None:
        return bar
    return Several([bar, TensorBoard(folder / "tensorboard")])


def _scores(result: Result) -> str:
    found = [(name, result.metrics[name]) for name in SHOWN if name in result.metrics]
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found)
