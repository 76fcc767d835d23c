"""How far a run of a queue is, as its folder tells; reading it changes nothing.

progress.json   where the worker is: steps, epochs, seconds a step; written every few seconds, and not durable
failure.json    why the last worker gave up; gone when the next one begins
worker.log      what the workers have said
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from credo.experiments.lock import living_holder
from credo.experiments.run_folder import RunFolder, to_json
from credo.experiments.watchers import Watcher

Stage = Literal["finished", "stored", "running", "failed", "interrupted", "waiting"]
EVERY: Final = 2.0  # seconds between two looks at a run
PROGRESS, FAILURE, WORKER_LOG = "progress.json", "failure.json", "worker.log"


@dataclass(frozen=True)
class RunStatus:
    state: Stage
    step: int = 0
    steps: int = 0
    epochs: int = 0
    seconds_per_step: float | None = None  # evaluations and checkpoints included
    message: str = ""  # of a failure
    pid: int | None = None  # of who works on it

    @property
    def done(self) -> bool:
        """Finished here, or stored by a queue whose run folders are elsewhere."""
        return self.state in ("finished", "stored")

    @property
    def share(self) -> float:
        return 1.0 if self.done else self.step / self.steps if self.steps else 0.0

    @property
    def whole(self) -> float | None:
        """Seconds for the whole run; None before it is known."""
        return None if self.seconds_per_step is None or not self.steps else self.seconds_per_step * self.steps


def status_of(folder: Path, stored: Callable[[], bool] = lambda: False) -> RunStatus:
    """`stored` is asked of a run that nobody has begun here: whether its record is there."""
    place, progress, failure = RunFolder(folder), _read(folder / PROGRESS), _read(folder / FAILURE)
    found: dict[str, Any] = {
        key: progress[key] for key in ("step", "steps", "epochs", "seconds_per_step") if key in progress
    }
    if place.finished:
        return RunStatus("finished", **found)
    pid = living_holder(folder / "lock")
    if pid is not None:
        return RunStatus("running", pid=pid, **found)
    if failure:
        return RunStatus("failed", message=str(failure.get("message", "")), **found)
    if place.checkpoints.is_dir():
        return RunStatus("interrupted", **found)
    return RunStatus("stored" if stored() else "waiting", **found)


def write_failure(folder: Path, code: int, message: str) -> None:
    """For `--status`; a full disk must not end the queue, and the message is on the terminal too."""
    with contextlib.suppress(OSError):
        _write(folder / FAILURE, {"code": code, "message": message, "time": time.strftime("%F %T%z")})


def forget_failure(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / FAILURE).unlink()


@final
class ProgressFile(Watcher):
    """Writes where the run is; a disk that is full is the training's to complain about."""

    def __init__(self, folder: Path, wait: Callable[[], float]) -> None:
        """`wait` is called after every step, returns when the run may go on, and says how many seconds it took."""
        self._path, self._wait = folder / PROGRESS, wait
        self._facts: dict[str, Any] = {}
        self._first_step, self._began, self._written = 0, 0.0, 0.0

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        known = {key: value for key, value in _read(self._path).items() if key == "seconds_per_step"}
        self._facts = {**known, "step": step, "steps": epochs * steps_per_epoch, "epochs": epochs}
        self._first_step, self._began = step, time.monotonic()
        self._write()

    def stepped(self, step: int) -> None:
        self._facts["step"] = step
        self._began += self._wait()
        if time.monotonic() - self._written >= EVERY:
            self._write()

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        """Only from here on is the cost of an evaluation part of the mean."""
        self._measure()

    def ended(self) -> None:
        self._write()

    def _measure(self) -> None:
        done = self._facts["step"] - self._first_step
        if done > 0:
            self._facts["seconds_per_step"] = (time.monotonic() - self._began) / done

    def _write(self) -> None:
        self._written = time.monotonic()
        with contextlib.suppress(OSError):
            _write(self._path, self._facts)


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    """Whole or not at all to a reader; not durable, since it is only news."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(to_json(facts))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Nothing where there is nothing to be read: this is news, not evidence."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
