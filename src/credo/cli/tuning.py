"""`credo tune`."""

from collections.abc import Iterable
from pathlib import Path

from credo.cli.exits import OK
from credo.cli.processes import device_of_rank, refuse_several
from credo.cli.runs import named_recipe
from credo.errors import InvalidType, InvalidValue
from credo.experiments.continual_runs import CONTINUAL
from credo.experiments.overrides import parse_assignments
from credo.experiments.tuning import tune_row
from credo.experiments.tuning.files import PAGE, RECIPE


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
    refuse_several("credo tune")
    if name in CONTINUAL:
        raise InvalidValue(f"{name} is a stream of tasks, and credo tune is for recipes with a single one.")
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
