"""The folder of one run: what lies where, and whether what lies there is the run that is asked for.

config.json               the Training, the seed, versions and machine
log.jsonl                 one line an epoch, see below
checkpoint/               (`checkpoint`)
model.safetensors         weights and buffers at the end; for a posterior, its mean
posterior.safetensors     for `credo.load_posterior`; a point is a posterior without variance
predictions.safetensors   test.probs, test.targets, …; validation.probs, … where the recipe keeps some training
                          examples for validation; ood.<name>.probs, … for each unfamiliar set
result.json               metrics, and the digests of these files; written last: its presence means finished
course.json               instead of all these, for a stream of tasks: its settings and scores, also written last
lock                      while a process writes

A line of the log:

    epoch, lr, tempering              after the epoch; lr and τ of its last step, τ null where there is none
    train_accuracy, train_nll         from the forward passes of training itself, as the weights went by: with dropout
                                      on, at samples of the weights for VOGN; no further pass over the training data
    accuracy, nll, brier, ece, auroc  of `credo.predict` on the test data (rmse and nll for regression)
    refused                           steps so far that were refused as not finite
    seconds                           of training in this epoch, evaluation and checkpoints left out

Of these `seconds` alone (TIMES) depends on anything but the recipe and the seed. What is not a number is null.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from credo import kernels
from credo.errors import IntegrityError, InvalidValue
from credo.experiments.lock import locked
from credo.experiments.recipe import TaskStream, Training
from credo.posterior.files import write_atomically

# A run whose state would not fit another value of these is another run; the rest may drift, with a warning.
IDENTITY: Final = frozenset({"method", "model", "model_options", "data", "task", "seed"}) | {
    "batch_size",
    "augment",
    "train_size",
    "validation_size",
    "held_out_classes",
}
SHOWN: Final = 5  # mismatches in a message


@dataclass(frozen=True)
class RunName:
    """Where a run belongs in a comparison; `size` is "cpu", "paper", or the user's own word."""

    recipe: str = ""
    row: str = ""
    size: str = ""


class RunFolder:
    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.config, self.log = self.path / "config.json", self.path / "log.jsonl"
        self.checkpoints, self.result = self.path / "checkpoint", self.path / "result.json"
        self.stream_result = self.path / "course.json"
        self.model = self.path / "model.safetensors"
        self.posterior = self.path / "posterior.safetensors"
        self.predictions = self.path / "predictions.safetensors"

    def make(self) -> None:
        """An OSError that names the path if it cannot be: a file in the way, no permission, a name too long."""
        self.path.mkdir(parents=True, exist_ok=True)

    def locked(self) -> AbstractContextManager[None]:
        return locked(self.path / "lock")

    @property
    def finished(self) -> bool:
        return self.result.exists() or self.stream_result.exists()

    def write_config(
        self,
        training: Training,
        seed: int,
        name: RunName,
        changes: list[Any],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        config = {
            "name": asdict(name),
            "training": described(training),
            "seed": seed,
            **provenance(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "changes": changes,
            **(more or {}),
        }
        write_atomically(self.config, to_json(config, indent=1).encode())

    def read_config(self) -> dict[str, Any]:
        return read_json(self.config)

    def compare(self, training: Training, seed: int, *, strictly: bool) -> list[str]:
        """Differences between the run that is here and the one asked for, in words; warned of, or an error.

        An error if what differs is part of the run's identity, or if `strictly`: a finished run cannot change.
        """
        config = self.read_config()
        # A field may be younger than the run
        saved = {**DEFAULTS, **config["training"], "seed": config["seed"]}
        asked = {**described(training), "seed": seed}
        names = [name for name in asked if saved.get(name) != asked[name]]
        words = [f"{name} was {saved.get(name)!r}, now {asked[name]!r}" for name in names]
        if words and (strictly or IDENTITY.intersection(names)):
            more = f"; and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
            raise InvalidValue(
                f"{self.path} holds another run: {'; '.join(words[:SHOWN])}{more}. Choose another folder, or start "
                "afresh with resume=False."
            )
        if words:
            warnings.warn(f"{self.path} continues with other settings: {'; '.join(words)}.", stacklevel=3)
        if not strictly:  # what is finished is only read
            self._warn_of_versions(config)
        return words

    def _warn_of_versions(self, config: Mapping[str, Any]) -> None:
        here = provenance()
        for part in ("versions", "kernels"):
            if config.get(part) != here[part]:
                warnings.warn(
                    f"{self.path} was written with {part} {config.get(part)}, and here are {here[part]}: results may "
                    "differ in the last bits.",
                    stacklevel=4,
                )

    def other_commit(self) -> list[str]:
        """In words, if the code is another than the run was last worked on with; for the record, not an error."""
        config, here = self.read_config(), provenance()["commit"]
        return [] if config.get("commit") == here else [f"commit was {config.get('commit')}, now {here}"]

    def clear(self, also: Iterable[Path] = ()) -> None:
        """Forget a run that was here; the result goes first, so that it is never taken for finished."""
        for path in (
            self.result,
            self.stream_result,
            self.log,
            self.model,
            self.posterior,
            self.predictions,
            *also,
        ):
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged or no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise IntegrityError(
            f"{path} is damaged: it holds a {type(found).__name__} where an object should be."
        )
    return found


def described(training: Training) -> dict[str, Any]:
    """As JSON holds it: functions by their names, tuples as lists; a single task has no `tasks`."""
    found = {field.name: _plain(getattr(training, field.name)) for field in fields(training)}
    return found if training.tasks is not None else {key: v for key, v in found.items() if key != "tasks"}


def described_stream(training: Training, seed: int, name: RunName) -> dict[str, Any]:
    """A stream of tasks as its checkpoints and its result have it."""
    stream = training.tasks
    assert stream is not None
    return {
        **asdict(name),
        "seed": seed,
        "tasks": stream.count,
        "training": {
            "method": training.method,
            "epochs": training.epochs,
            "batch_size": training.batch_size,
            "settings": dict(training.settings),
            "start": stream.start,
            "hold": stream.hold,
            "last_lr": stream.last_lr,
            "samples": training.samples,
            "strength": stream.strength,
            "online": stream.online,
        },
    }


def check_same_stream(folder: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """An error that names the first difference between what is saved and `described_stream`."""
    different = [name for name, value in asked.items() if saved.get(name) != value]
    if different:
        name = different[0]
        raise InvalidValue(
            f"{folder} holds another run: {name} was {saved.get(name)!r}, now {asked[name]!r}. Choose another folder, "
            "or remove this one."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, TaskStream):
        return asdict(value)
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return value


DEFAULTS: Final = {
    field.name: _plain(field.default) for field in fields(Training) if field.default is not MISSING
}


# The log

TIMES: Final = frozenset({"seconds"})
LogRow = dict[str, Any]


def write_log(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All rows at once, atomically: a resumed run takes back what was logged after its checkpoint."""
    write_atomically(path, "".join(f"{to_json(row)}\n" for row in rows).encode())


def read_log(path: Path) -> list[LogRow]:
    """The rows; undefined numbers are NaN, except the tempering of a method without one."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(revived(json.loads(line)))
        except ValueError as error:
            raise IntegrityError(f"{path}:{number} is no line of JSON: {error}") from error
    return rows


def without_times(row: Mapping[str, Any]) -> LogRow:
    return {name: value for name, value in row.items() if name not in TIMES}


def to_json(value: object, indent: int | None = None) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def revived(row: Mapping[str, Any]) -> LogRow:
    return {name: math.nan if value is None and name != "tempering" else value for name, value in row.items()}


def finite(value: Any) -> Any:
    """As JSON can hold it: mappings with names, lists, and None for what is no finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


# Where a result comes from: versions, commit, kernels, cores and processor


def provenance() -> dict[str, object]:
    """What every run stores beside its settings."""
    # By name: no layer imports the package that gathers them all
    version: str = import_module("credo").__version__
    return {
        "versions": {"credo": version, "torch": torch.__version__, "python": sys.version.split()[0]},
        "commit": commit(),
        "kernels": str(kernels.status()),
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processor": processor(),
            "system": platform.platform(),
        },
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the source tree credo is imported from, with "+" where files differ; None if installed.

    Asked once a process: what is imported later than a change of branch would not be told anyway.
    """
    here = Path(__file__).resolve().parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    return None if head is None else head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git here, or not one it trusts
        return None
    return found.stdout.strip()


def processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
