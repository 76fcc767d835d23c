"""The search itself: optuna's sampler, pruner and SQLite storage, and a loop that can be killed at any moment.

Every trial is stored as it goes. What a dead process has left as running is marked as failed when the study is opened
again, and does not count. The sampler of the k-th trial that counts has a seed made of the study's seed and k, and
looks at the trials before it: a study that was killed proposes what an undisturbed one would have.
"""

import hashlib
import json
import math
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch

from credo.errors import CredoError, IntegrityError, InvalidValue, NonFiniteError
from credo.experiments.lock import locked
from credo.experiments.tuning.spaces import Space
from credo.experiments.tuning.trials import Problem, Report, Scores, run_trial
from credo.optim.arguments import number, whole

# How far a search is: a bar on the terminal with rich, or a line for each trial without it

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial


class Display:
    """What a search tells as it goes; shows nothing by itself."""

    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None: ...
    def trial_began(self, index: int, epochs: int) -> None: ...
    def reported(self, epoch: int, nll: float) -> None: ...
    def trial_ended(self, finished: "list[FrozenTrial]") -> None: ...
    def ended(self) -> None: ...


@final
class SearchLines(Display):
    """For logs, and where rich is not installed."""

    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None:
        if finished:
            print(f"going on after {len(finished)} trials; {summary(finished)}", file=sys.stderr)

    def trial_ended(self, finished: "list[FrozenTrial]") -> None:
        last = finished[-1]
        value = "" if last.value is None else f", NLL {last.value:.4f}"
        state = {"COMPLETE": "done", "PRUNED": "dropped early", "FAIL": "failed"}[last.state.name]
        print(f"trial {len(finished) - 1}: {state}{value}; {summary(finished)}", file=sys.stderr)


@final
class SearchBars(Display):
    """Two bars: trials (or minutes) of the budget, and epochs of the trial under way."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=Console(stderr=True),
        )
        self._all: Any = None
        self._one: Any = None
        self._budget: Budget | None = None
        self._epochs = 0

    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None:
        self._budget = budget
        self._bars.start()
        self._all = self._bars.add_task("search", total=1.0, done="", more="")
        self._one = self._bars.add_task("trial", total=1.0, done="", more="")
        self.trial_ended(finished)

    def trial_began(self, index: int, epochs: int) -> None:
        self._epochs = epochs
        self._bars.reset(
            self._one, description=f"trial {index}", total=epochs, done=f"epoch 0/{epochs}", more=""
        )

    def reported(self, epoch: int, nll: float) -> None:
        self._bars.update(
            self._one, completed=epoch, done=f"epoch {epoch}/{self._epochs}", more=f"NLL {nll:.4f}"
        )

    def trial_ended(self, finished: "list[FrozenTrial]") -> None:
        assert self._budget is not None
        minutes = sum(t.duration.total_seconds() for t in finished if t.duration is not None) / 60
        trials, limit = self._budget.trials, self._budget.minutes
        parts = [len(finished) / trials if trials else 0.0, minutes / limit if limit else 0.0]
        words = [
            f"{len(finished)}/{trials} trials" if trials else f"{len(finished)} trials",
            *([f"{minutes:.1f}/{limit:g} min"] if limit else []),
        ]
        self._bars.update(
            self._all, completed=min(max(parts), 1.0), done=", ".join(words), more=summary(finished)
        )

    def ended(self) -> None:
        self._bars.stop()


def summary(finished: "list[FrozenTrial]") -> str:
    """The best so far, beside the defaults."""
    if not finished:
        return ""
    values = [t.value for t in finished if t.state.name == "COMPLETE" and t.value is not None]
    first = finished[0].value if finished[0].state.name == "COMPLETE" else math.nan
    best = f"best NLL {min(values):.4f}" if values else "none complete yet"
    return f"{best}, defaults {first:.4f}"


def display_for(progress: bool) -> Display:
    if not progress:
        return Display()
    try:
        import rich  # noqa: F401
    except ImportError:
        return SearchLines()
    return SearchBars() if sys.stderr.isatty() else SearchLines()


# The search

NAME: Final = "credo"
FILE: Final = "study.db"
STARTUP: Final = 8  # trials before the sampler learns from them; the first is the defaults
UNPRUNED: Final = 4  # complete trials before others are compared with their median
DIVERGED: Final = (NonFiniteError, torch.linalg.LinAlgError, OverflowError)  # type: ignore[attr-defined]


def optuna_module() -> Any:
    try:
        import optuna
        import plotly  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise InvalidValue(
            f"tuning needs {error.name}, which is not installed: pip install 'credo[tune]'."
        ) from error
    return optuna


@dataclass(frozen=True)
class Budget:
    """How long to search: a number of trials, minutes of training, or whichever of both is reached first."""

    trials: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.trials is None and self.minutes is None:
            raise InvalidValue("a search needs a budget: give trials, minutes, or both.")
        if self.trials is not None:
            whole("trials", self.trials, 1)
        if self.minutes is not None:
            number("minutes", self.minutes, 0, float("inf"), open_low=True)

    def left(self, finished: "list[FrozenTrial]") -> bool:
        """Time is that of all trials of the study, however often it was started."""
        enough = self.trials is not None and len(finished) >= self.trials
        late = self.minutes is not None and sum(map(seconds_of, finished)) >= 60 * self.minutes
        return not (enough or late)


def search(
    problem: Problem,
    space: Space,
    folder: Path,
    budget: Budget,
    identity: Mapping[str, Any],
    display: Display,
) -> "Study":
    """Go on with the study in the folder, or begin it, until the budget is spent."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"), quiet():
        study = opened(folder, identity)
        study.pruner = optuna_module().pruners.MedianPruner(
            n_startup_trials=UNPRUNED, n_warmup_steps=problem.training.epochs // 4
        )
        for trial in study.get_trials(deepcopy=False, states=[state("RUNNING")]):
            study.tell(trial.number, state=state("FAIL"))
        display.began(budget, counted(study))
        try:
            while budget.left(counted(study)):
                one_trial(study, problem, space, display)
                display.trial_ended(counted(study))
        finally:
            display.ended()
    return study


def one_trial(study: "Study", problem: Problem, space: Space, display: Display) -> None:
    index = len(counted(study))
    study.sampler = optuna_module().samplers.TPESampler(
        seed=seed_of(problem.seed, index), n_startup_trials=STARTUP
    )
    if index == 0 and not study.get_trials(deepcopy=False, states=[state("WAITING")]):
        study.enqueue_trial(space.defaults)
    trial = study.ask()
    try:
        training = space(trial)
        trial.set_user_attr("settings", dict(training.settings))
        trial.set_user_attr("model_options", dict(training.model_options))
        display.trial_began(index, problem.training.epochs)
        scores = run_trial(problem, training, reporter(trial, display))
        trial.set_user_attr("scores", dict(scores))
        study.tell(trial, scores["nll"])
    except optuna_module().TrialPruned:
        study.tell(trial, state=state("PRUNED"))
    except BaseException as error:
        if not own_failure(error, index):  # interrupted, say: it does not count, and is repeated
            with suppress(Exception):  # what is left as running is found at the next start
                study.tell(trial, state=state("FAIL"))
            raise
        trial.set_user_attr("reason", " ".join(str(error).split()) or type(error).__name__)
        study.tell(trial, state=state("FAIL"))


def own_failure(error: BaseException, index: int) -> bool:
    """Whether the trial's numbers are to blame. Where the defaults fail for another reason, they are not."""
    refused = index > 0 and isinstance(error, CredoError) and not isinstance(error, OSError)
    return refused or isinstance(error, DIVERGED)


def reporter(trial: "Trial", display: Display) -> Report:
    def report(epoch: int, scores: Scores) -> None:
        trial.report(scores["nll"], epoch)
        display.reported(epoch, scores["nll"])
        if trial.should_prune():
            trial.set_user_attr("scores", dict(scores))
            raise optuna_module().TrialPruned

    return report


def opened(folder: Path, identity: Mapping[str, Any]) -> "Study":
    """The study of this identity in the folder; nothing is changed if there is another."""
    optuna = optuna_module()
    with readable(folder / FILE):
        storage = storage_at(folder / FILE)
        names = optuna.get_all_study_names(storage)
        if names and names != [NAME]:
            raise InvalidValue(
                f"{folder / FILE} holds studies that credo did not make ({', '.join(names)}). Choose another folder."
            )
        study: Study = optuna.create_study(
            storage=storage, study_name=NAME, direction="minimize", load_if_exists=True
        )
        check_identity(study, folder, json.loads(json.dumps(identity)))
    return study


def check_identity(study: "Study", folder: Path, asked: dict[str, Any]) -> None:
    stored = study.user_attrs.get("identity")
    if stored is None and not study.get_trials(deepcopy=False):  # new, or killed at its first breath
        study.set_user_attr("identity", asked)
        return
    stored = stored if isinstance(stored, dict) else {}
    different = [name for name in asked if stored.get(name) != asked[name]]
    if different:
        words = "; ".join(f"{name} was {stored.get(name)!r}, now {asked[name]!r}" for name in different[:3])
        raise InvalidValue(
            f"{folder} holds another study: {words}. Its trials cannot be compared with new ones. Choose another "
            f"folder, or delete {FILE} in it to begin again."
        )


def storage_at(path: Path) -> Any:
    from sqlalchemy.engine import URL

    url = URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)
    return optuna_module().storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside, a file that is no database is named as what is wrong."""
    from sqlalchemy.exc import DatabaseError

    try:
        if path.exists():
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA schema_version")
            connection.close()
        yield
    except (sqlite3.DatabaseError, DatabaseError) as error:
        raise IntegrityError(
            f"{path} is damaged or no SQLite database: {error}. Restore it, or choose another folder."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without optuna's own lines for every trial."""
    logging = optuna_module().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def state(name: str) -> Any:
    return optuna_module().trial.TrialState[name]


def counted(study: "Study") -> "list[FrozenTrial]":
    """Trials that came to an end of their own: complete, dropped early, or failed for a reason."""
    ended = study.get_trials(deepcopy=False, states=[state("COMPLETE"), state("PRUNED"), state("FAIL")])
    return [trial for trial in ended if trial.state != state("FAIL") or "reason" in trial.user_attrs]


def seconds_of(trial: "FrozenTrial") -> float:
    return 0.0 if trial.duration is None else trial.duration.total_seconds()


def seed_of(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big")
