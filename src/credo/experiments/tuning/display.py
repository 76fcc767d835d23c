"""How far a search is: a bar on the terminal with rich, or a line for each trial without it."""

import math
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from credo.experiments.tuning.study import Budget


class Display(ABC):
    """Sees, and changes nothing."""

    @abstractmethod
    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None: ...

    @abstractmethod
    def trial_began(self, index: int, epochs: int) -> None: ...

    @abstractmethod
    def reported(self, epoch: int, nll: float) -> None: ...

    @abstractmethod
    def trial_ended(self, finished: "list[FrozenTrial]") -> None: ...

    @abstractmethod
    def ended(self) -> None: ...


@final
class Hidden(Display):
    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None: ...
    def trial_began(self, index: int, epochs: int) -> None: ...
    def reported(self, epoch: int, nll: float) -> None: ...
    def trial_ended(self, finished: "list[FrozenTrial]") -> None: ...
    def ended(self) -> None: ...


@final
class Lines(Display):
    """For logs, and where rich is not installed."""

    def began(self, budget: "Budget", finished: "list[FrozenTrial]") -> None:
        if finished:
            print(f"going on after {len(finished)} trials; {summary(finished)}", file=sys.stderr)

    def trial_began(self, index: int, epochs: int) -> None: ...
    def reported(self, epoch: int, nll: float) -> None: ...

    def trial_ended(self, finished: "list[FrozenTrial]") -> None:
        last = finished[-1]
        value = "" if last.value is None else f", NLL {last.value:.4f}"
        state = {"COMPLETE": "done", "PRUNED": "dropped early", "FAIL": "failed"}[last.state.name]
        print(f"trial {len(finished) - 1}: {state}{value}; {summary(finished)}", file=sys.stderr)

    def ended(self) -> None: ...


@final
class Bars(Display):
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
        return Hidden()
    try:
        import rich  # noqa: F401
    except ImportError:
        return Lines()
    return Bars() if sys.stderr.isatty() else Lines()
