"""The folder of one run: what lies where, and whether what lies there is the run that is asked for.

config.json               the Training, the seed, versions and machine
log.jsonl                 one line an epoch (`log`)
checkpoint/               (`checkpoint`)
model.safetensors         weights and buffers at the end; for a posterior, its mean
posterior.safetensors     for `credo.load_posterior`; a point is a posterior without variance
predictions.safetensors   test.probs, test.targets, …; validation.probs, … where the recipe keeps some training
                          examples for validation; ood.<name>.probs, … for each unfamiliar set
result.json               metrics, and the digests of these files; written last: its presence means finished
lock                      while somebody writes
"""

import json
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final

from credo.errors import IntegrityError, InvalidValue
from credo.experiments.lock import locked
from credo.experiments.log import to_json
from credo.experiments.machine import provenance
from credo.experiments.recipe import Training
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
        return self.result.exists()

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
        saved = {
            **DEFAULTS,
            **config["training"],
            "seed": config["seed"],
        }  # a field may be younger than the run
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
        for path in (self.result, self.log, self.model, self.posterior, self.predictions, *also):
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
    """As JSON holds it: functions by their names, tuples as lists."""
    return {field.name: _plain(getattr(training, field.name)) for field in fields(training)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if callable(value):
        return (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return value


DEFAULTS: Final = {
    field.name: _plain(field.default) for field in fields(Training) if field.default is not MISSING
}
