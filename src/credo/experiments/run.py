"""A recipe, run: its rows times its seeds, each in a folder of its own."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from credo.distributed import world
from credo.errors import InvalidValue
from credo.experiments.checkpoint import Checkpointing
from credo.experiments.ensembles import ensemble_of, ensemble_row
from credo.experiments.methods import METHODS
from credo.experiments.names import known, plain_name
from credo.experiments.overrides import check_seed, check_training, whole_number, with_overrides
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.results import Result
from credo.experiments.run_folder import RunName
from credo.experiments.streams import METHODS as STREAM_METHODS
from credo.experiments.train import train
from credo.experiments.watchers import Watcher

SIZES: Final = ("cpu", "paper")


def run(
    recipe: Recipe,
    *,
    size: str = "cpu",
    only: Iterable[str] = (),
    seeds: int | Sequence[int] | None = None,
    out: str | PathLike[str],
    data_root: str | PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    resume: str | bool = "auto",
    watcher: Callable[[str, Path], Watcher] | None = None,
    checkpointing: Checkpointing | None = None,
    device: str = "cpu",
    ensemble: int | None = None,
    finished: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train every row (or `only` some) with every seed; what is finished is not trained again.

    seeds: how many (0, 1, …), or which; those of the recipe unless given, mostly one.
    overrides: as `with_overrides`, for every row that is run.
    watcher: makes one for each run, from a title and the run's folder.
    ensemble: also make one of the first so many seeds of each row, which are trained if `seeds` are fewer.
    finished: called with every result as soon as it is there.
    All rows are checked before the first is trained. With a process group every rank calls this, and rank 0 watches.
    """
    watched = watcher if world().rank == 0 else None
    plan = trainings(recipe, size, only, overrides or {})
    numbers = seed_list(recipe.seeds.get(size, 1) if seeds is None else seeds)
    if ensemble is not None:
        if recipe.is_stream:
            raise InvalidValue(f"{recipe.name} is a stream of tasks, for which there is no ensemble.")
        whole_number("ensemble", ensemble, 2)
        numbers = sorted({*numbers, *range(ensemble)})
    results = []
    for row, training in plan.items():
        for seed in numbers:
            folder = run_path(out, recipe.name, size, row, seed)
            result = train(
                training,
                seed,
                folder,
                resume=resume,
                data_root=data_root,
                watcher=None if watched is None else watched(f"{row} seed {seed}", folder),
                name=RunName(recipe.name, row, size),
                checkpointing=checkpointing,
                device=device,
            )
            results.append(result)
            if finished is not None:
                finished(result)
        if ensemble is not None:
            name = RunName(recipe.name, ensemble_row(row, ensemble), size)
            members = [run_path(out, recipe.name, size, row, seed) for seed in range(ensemble)]
            folder = run_path(out, recipe.name, size, name.row, 0)
            results.append(
                ensemble_of(training, members, folder, data_root=data_root, name=name, device=device)
            )
    return results


def trainings(
    recipe: Recipe, size: str, only: Iterable[str], overrides: Mapping[str, object]
) -> dict[str, Training]:
    """Row name → what to train. Rows without this size, or of an unknown method, are left out with a warning."""
    known("size", size, SIZES)
    plain_name("recipe name", recipe.name)
    rows = {plain_name("row name", row.name): row for row in recipe.rows}
    asked = [known(f"row of {recipe.name}:", name, rows) for name in only]
    chosen = {}
    for name in asked or rows:
        reason = why_not(rows[name], size)
        if reason is None:
            chosen[name] = checked(rows[name], size, overrides)
        elif asked:
            raise InvalidValue(f"row {name!r} of {recipe.name} {reason}.")
        else:
            warnings.warn(f"row {name!r} of {recipe.name} {reason}: left out.", stacklevel=3)
    return chosen


def why_not(row: Row, size: str) -> str | None:
    training = row.training(size)
    if training is None:
        return f"has no {size} size"
    methods = METHODS if training.tasks is None else STREAM_METHODS
    return None if training.method in methods else f"needs the method {training.method!r}, which is not here"


def checked(row: Row, size: str, overrides: Mapping[str, object]) -> Training:
    training = row.training(size)
    assert training is not None  # `why_not` has seen to it
    changed = with_overrides(training, overrides)
    check_training(changed)
    return changed


def seed_list(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, Sequence):
        return [check_seed(seed) for seed in seeds]
    return list(range(whole_number("seeds", seeds, 1)))


def run_path(out: str | PathLike[str], recipe: str, size: str, row: str, seed: int) -> Path:
    return Path(out) / plain_name("recipe name", recipe) / size / plain_name("row name", row) / f"seed-{seed}"
