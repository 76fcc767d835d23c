"""A queue: a plain list of runs, as a TOML file.

    [[runs]]
    recipe = "table1-lenet5"          # a name, or a recipe file beside this one
    row = "vogn"                      # or rows = ["adam", "vogn"]
    seed = 0                          # or seeds = [0, 1, 2]
    size = "paper"                    # "cpu" unless given
    settings = { lr = 1e-3, epochs = 20, "model_options.width" = 16 }    # what `credo run --set` takes
    sweep = { damping = [1e-3, 1e-2] }         # every combination of these values is a run of its own
    name = "vogn-small"               # of the row with these settings; made from them unless given
    ensemble = 5                      # instead of seeds: seeds 0 to 4, then the ensemble of them
    priority = 10                     # higher ones first, 0 unless given; then in the order of the file

Every run is checked before the first begins. A wrong key, name or value is an error with file and line.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from credo.errors import InvalidValue
from credo.experiments.ensembles import ensemble_row
from credo.experiments.names import known, plain_name
from credo.experiments.overrides import check_seed
from credo.experiments.recipe import Recipe, Training
from credo.experiments.recipe_file import Path_, TomlFile, load_recipe
from credo.experiments.recipes import recipe as recipe_of
from credo.experiments.records import is_recorded, record_path
from credo.experiments.run import SIZES, run_path, trainings
from credo.experiments.run_folder import RunName

KEYS: Final = (
    *("recipe", "row", "rows", "seed", "seeds", "ensemble", "size"),
    *("settings", "sweep", "name", "priority"),
)
UNNAMED: Final = ("epoch_samples", "epoch_test_size", "ood")  # no part of a name: training is the same
NAME_LENGTH: Final = 85  # of a row's folder; longer ones end in a digest


@dataclass(frozen=True)
class Job:
    """One run of the list. Its folder and its record follow from recipe, size, label and seed."""

    recipe: str
    source: str  # the recipe's name, or the path of its file
    row: str
    label: str  # the row's name where it has settings of its own
    size: str
    seed: int
    overrides: Mapping[str, Any]
    training: Training
    priority: int
    ensemble: int = 0  # how many members; 0: a run that is trained

    @property
    def title(self) -> str:
        return f"{self.recipe} {self.size} {self.label} seed {self.seed}"

    @property
    def name(self) -> RunName:
        return RunName(self.recipe, self.label, self.size)

    def facts(self) -> dict[str, Any]:
        """As JSON holds it, for `job_of`; the file may have changed when a worker begins."""
        return {name: getattr(self, name) for name in FACTS}

    def members(self, out: str | PathLike[str]) -> list[Path]:
        """The folders of the runs that an ensemble is made of."""
        row = self.label.removesuffix(ensemble_row("", self.ensemble))
        return [run_path(out, self.recipe, self.size, row, seed) for seed in range(self.ensemble)]

    def folder(self, out: str | PathLike[str]) -> Path:
        return run_path(out, self.recipe, self.size, self.label, self.seed)

    def record(self, results: str | PathLike[str]) -> Path:
        return record_path(results, self.recipe, self.size, self.label, self.seed)

    def is_recorded(self, results: str | PathLike[str] | None) -> bool:
        """Whether this run has been stored, here or on another machine; the run folder need not be there."""
        return results is not None and is_recorded(
            self.record(results), self.training, self.seed, self.ensemble
        )


JobKey = tuple[str, str, str, int]


def key_of(job: Job) -> JobKey:
    """What decides the folder; two runs of one list differ in it."""
    return job.recipe, job.size, job.label, job.seed


FACTS: Final = ("source", "row", "label", "size", "seed", "overrides", "priority", "ensemble")


def job_of(facts: Mapping[str, Any]) -> Job:
    recipe = load_recipe(facts["source"]) if facts["source"].endswith(".toml") else recipe_of(facts["source"])
    row, size = facts["row"], facts["size"]
    training = trainings(recipe, size, [row], facts["overrides"])[row]
    return Job(recipe.name, training=training, **{name: facts[name] for name in FACTS})


def load_queue(path: str | PathLike[str]) -> list[Job]:
    """All runs of the file in the order they are to be run in."""
    return QueueFile(Path(path)).jobs()


class QueueFile(TomlFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "a queue", "one [[runs]]")

    def jobs(self) -> list[Job]:
        self.check_keys((), self.tables, ("runs",), required=("runs",))
        entries = self.typed(("runs",), self.tables["runs"], list)
        if not entries:
            raise self.at(("runs",), InvalidValue("a queue needs at least one [[runs]]."))
        found: dict[JobKey, Job] = {}
        for k, entry in enumerate(entries):
            for job in self._entry(k, self.typed(("runs", k), entry, dict)):
                other = found.setdefault(key_of(job), job)
                if other is not job:
                    self._check_duplicate(k, job, other, "ensemble" in entry)
        return sorted(found.values(), key=lambda job: -job.priority)  # stable: else as in the file

    def _entry(self, k: int, entry: dict[str, Any]) -> list[Job]:
        here: Path_ = ("runs", k)
        self.check_keys(here, entry, KEYS, required=("recipe",))
        recipe, source = self.guard((*here, "recipe"), self._recipe, entry["recipe"])
        size = self.guard((*here, "size"), known, "size", entry.get("size", "cpu"), SIZES)
        rows = self._one_or_many(here, entry, "row", str)
        seeds = self._seeds(here, entry)
        for seed in seeds:
            self.guard((*here, "seeds" if "seeds" in entry else "seed"), check_seed, seed)
        priority = self.typed((*here, "priority"), entry.get("priority", 0), int)
        combined = self._combined(here, entry)
        if "name" in entry and len(rows) * len(combined) > 1:
            raise self.at(
                (*here, "name"), InvalidValue("name is for one row with one set of settings; leave it out.")
            )
        jobs = []
        for row, overrides in itertools.product(rows, combined):
            label, training = self._checked(here, entry, recipe, size, row, overrides)
            one = Job(recipe.name, source, row, label, size, 0, overrides, training, priority)
            jobs += [replace(one, seed=seed) for seed in seeds]
            if "ensemble" in entry:
                name = self.guard(
                    (*here, "name"), plain_name, "name of the ensemble", ensemble_row(label, len(seeds))
                )
                jobs.append(replace(one, label=name, ensemble=len(seeds)))
        return jobs

    def _checked(
        self,
        here: Path_,
        entry: Mapping[str, Any],
        recipe: Recipe,
        size: str,
        row: str,
        overrides: Mapping[str, Any],
    ) -> tuple[str, Training]:
        """The name the run goes by, and what is trained."""
        keys = [key for table in ("settings", "sweep") for key in entry.get(table, {})]
        found = self.guard(here, trainings, recipe, size, [row], {})[row]
        for key in keys:  # one by one, so that the line of a wrong one is found
            needs = {name: overrides[name] for name in ("method", "model", "task") if name in overrides}
            table = "settings" if key in entry.get("settings", {}) else "sweep"
            where = (*here, table, key)
            self.guard(where, trainings, recipe, size, [row], {**needs, key: overrides[key]})
        if overrides:
            found = self.guard(here, trainings, recipe, size, [row], overrides)[row]
        name = entry.get("name", label_of(row, overrides))
        return self.guard((*here, "name"), plain_name, "name", name), found

    def _recipe(self, name: Any) -> tuple[Recipe, str]:
        if isinstance(name, str) and name.endswith(".toml"):
            path = self.path.parent / name
            return load_recipe(path), str(path)
        return recipe_of(name), name

    def _seeds(self, here: Path_, entry: Mapping[str, Any]) -> list[int]:
        if "ensemble" not in entry:
            return self._one_or_many(here, entry, "seed", int)
        if "seed" in entry or "seeds" in entry:
            raise self.at(
                (*here, "ensemble"), InvalidValue("ensemble = n takes seeds 0 to n - 1; leave seeds out.")
            )
        size = self.typed((*here, "ensemble"), entry["ensemble"], int)
        if size < 2:
            raise self.at((*here, "ensemble"), InvalidValue(f"ensemble must be at least 2, got {size}."))
        return list(range(size))

    def _one_or_many(self, here: Path_, entry: Mapping[str, Any], key: str, kind: type) -> list[Any]:
        both = f"{key}s"
        if (key in entry) == (both in entry):
            raise self.at(here, InvalidValue(f"a run needs {key!r} or {both!r}, and one of them only."))
        if key in entry:
            return [self.typed((*here, key), entry[key], kind)]
        values = self.typed((*here, both), entry[both], list)
        if not values:
            raise self.at((*here, both), InvalidValue(f"{both} is empty."))
        return [self.typed((*here, both), value, kind) for value in values]

    def _combined(self, here: Path_, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The settings, once for each combination of the sweep's values."""
        settings = self.typed((*here, "settings"), entry.get("settings", {}), dict)
        sweep = self.typed((*here, "sweep"), entry.get("sweep", {}), dict)
        for key, values in sweep.items():
            if not self.typed((*here, "sweep", key), values, list):
                raise self.at((*here, "sweep", key), InvalidValue(f"the sweep over {key} is empty."))
            if key in settings:
                raise self.at((*here, "sweep", key), InvalidValue(f"{key} is in settings and in sweep."))
        return [
            {**settings, **dict(zip(sweep, values, strict=True))}
            for values in itertools.product(*sweep.values())
        ]

    def _check_duplicate(self, k: int, job: Job, other: Job, member: bool) -> None:
        """A run that is in the list anyway may be a member of an ensemble too; else one of the two is a mistake."""
        if member and not job.ensemble and job.training == other.training:
            return
        raise self.at(
            ("runs", k),
            InvalidValue(
                f"{job.title} is in the queue twice. Give one of them another name, or take it out; an ensemble comes "
                "after the runs that it shares."
            ),
        )


def label_of(row: str, overrides: Mapping[str, Any]) -> str:
    """`vogn+lr=0.01+epochs=5`: a name for a row with these settings, which can be a folder."""
    told = {key: value for key, value in overrides.items() if key not in UNNAMED}
    parts = [row, *(f"{key.rpartition('.')[2]}={_text(value)}" for key, value in told.items())]
    text = "+".join(parts).replace(":", ".")  # uci:yacht:3
    plain = re.sub(r"[^A-Za-z0-9_.+=-]", "_", text).replace("..", "_")
    if plain == text and len(text) <= NAME_LENGTH:
        return text
    return f"{plain[: NAME_LENGTH - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "_".join(_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
