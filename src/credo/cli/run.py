"""`credo run`, `credo report` and `credo tune`."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from credo.cli.exits import OK
from credo.cli.launch import device_of_rank, process_group, require_one_process
from credo.distributed import world
from credo.errors import InvalidType, InvalidValue
from credo.experiments import report as reports
from credo.experiments.overrides import parse_assignments
from credo.experiments.recipe import Recipe
from credo.experiments.recipe_file import load_recipe
from credo.experiments.recipes import recipe as recipe_of
from credo.experiments.results import Result, load_results
from credo.experiments.run import run as run_recipe
from credo.experiments.tuning import tune_row
from credo.experiments.tuning.outcome import PAGE, RECIPE
from credo.experiments.watchers import ProgressBar, Several, TensorBoard, Watcher

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
        recipe = named_recipe(name)
        results = run_recipe(
            recipe,
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
            finished=_tell if recipe.is_stream else None,
        )
        if world().rank == 0 and recipe.is_stream:
            folder = out / recipe.name / size
            print(reports.write_table(folder, results))
            print(f"table and figure: {folder}")
        elif world().rank == 0:
            for result in results:
                print(f"{result.folder}: {_scores(result)}")
            print(f"compare with: credo report {out}")
        return OK


def _tell(result: Result) -> None:
    """A run of a stream of tasks, as soon as it has finished."""
    if world().rank == 0:
        score, seconds = 100 * result.metrics["average_accuracy"], result.metrics["seconds"]
        print(f"{result.row} seed {result.seed}: {score:.2f} % in {seconds:.0f} s", flush=True)


def named_recipe(name: str) -> Recipe:
    """One of credo's by name; or the user's own, a file whose name ends in .toml."""
    if name.endswith(".toml"):
        return load_recipe(name)
    return recipe_of(name)


def report(out: Path, data: Path | None, docs: bool) -> int:
    if not out.is_dir():
        raise FileNotFoundError(f"there is no folder {out}; credo run RECIPE --out {out} makes one")
    if docs:
        page, *pictures = reports.write_page(out, out.resolve().parent / "docs" / "results.md")
        print(f"{page}\n{len(pictures)} figures in {page.parent / 'figures' / 'results'}")
        return OK
    results = load_results(out)
    if not results:
        return _report_records(out)
    reports.terminal(Console(highlight=False), reports.tables(results))
    for path in reports.write(out, results, data_root=data)[:2]:
        print(path)
    return OK


def _report_records(out: Path) -> int:
    records = reports.load_records(out)
    if not records:
        raise InvalidValue(f"{out} holds no finished run; a run under way is shown when it has finished")
    reports.terminal(Console(highlight=False), reports.tables(records))
    return OK


def _watcher(title: str, folder: Path) -> Watcher:
    bar = ProgressBar(Console(stderr=True))
    if find_spec("tensorboard") is None:
        return bar
    return Several([bar, TensorBoard(folder / "tensorboard")])


def _scores(result: Result) -> str:
    found = [(name, result.metrics[name]) for name in SHOWN if name in result.metrics]
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found)


def tune(
    name: str,
    row: str,
    trials: int | None,
    minutes: float | None,
    validation: float,
    search: Iterable[str],
    assignments: Iterable[str],
    defaults: bool,
    size: str,
    seed: int,
    seeds: int,
    out: Path,
    data: Path | None,
    device: str,
) -> int:
    require_one_process("credo tune")
    found = tune_row(
        named_recipe(name),
        row,
        size=size,
        overrides=parse_assignments(assignments),
        from_defaults=defaults,
        validation_fraction=validation,
        trials=trials,
        minutes=minutes,
        search=ranges(search),
        out=out,
        data_root=data,
        seed=seed,
        seeds=seeds,
        device=device_of_rank(device),
    )
    print(found.table())
    print(f"\n{found.constructor}\n")
    print(f"plots and all trials: {found.folder / PAGE}")
    recipe = found.folder / RECIPE
    if recipe.exists():
        print(f"on the test data: credo run {recipe} --out runs")
    return OK


def ranges(search: Iterable[str]) -> dict[str, tuple[float, float] | None] | None:
    """["lr", "noise=0.5,2"] → {"lr": None, "noise": (0.5, 2.0)}; None for an empty list: all there are."""
    found: dict[str, tuple[float, float] | None] = {}
    for text in search:
        name, sign, limits = text.partition("=")
        try:
            low, high = (float(part) for part in limits.split(",")) if sign else (0.0, 0.0)
        except ValueError:
            raise InvalidType(f"--search {text!r} must be NAME or NAME=LOW,HIGH with two numbers") from None
        found[name.strip()] = (low, high) if sign else None
    return found or None
