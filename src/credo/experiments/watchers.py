"""Watching a run: a progress bar with rates and remaining time, and TensorBoard. Watchers see, and change nothing."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, final

from credo.errors import InvalidValue


class Watcher:
    """Sees nothing by itself. `stepped` is called at every step and must be cheap; `ended` also after an error."""

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        """A run begins, or goes on from `step`."""

    def stepped(self, step: int) -> None:
        """`step` steps have been taken."""

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        """A line of the log."""

    def ended(self) -> None:
        """The run is over, finished or not."""


@final
class Several(Watcher):
    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = list(watchers)

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        for watcher in self._watchers:
            watcher.started(title, epochs, steps_per_epoch, step)

    def stepped(self, step: int) -> None:
        for watcher in self._watchers:
            watcher.stepped(step)

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.epoch_ended(row)

    def ended(self) -> None:
        for watcher in self._watchers:
            watcher.ended()


@final
class ProgressBar(Watcher):
    """One line on the terminal: epoch, steps a second, remaining time, the latest scores (rich, ten times a second)."""

    def __init__(self, console: Any = None) -> None:
        try:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError as error:
            raise InvalidValue("a progress bar needs rich: pip install credo[experiments].") from error
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]}  {task.fields[rate]:>6} steps/s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[scores]}"),
            console=console,
        )
        self._task: Any = None
        self._per_epoch = self._epochs = 1

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        self._epochs, self._per_epoch = epochs, steps_per_epoch
        total = epochs * steps_per_epoch
        self._bar.start()
        self._task = self._bar.add_task(
            title, total=total, completed=step, epoch=f"0/{epochs}", rate="", scores=""
        )

    def stepped(self, step: int) -> None:
        task = self._bar.tasks[self._task]
        rate = "" if task.speed is None else f"{task.speed:.1f}"
        epoch = min(step // self._per_epoch + 1, self._epochs)
        self._bar.update(self._task, completed=step, epoch=f"{epoch}/{self._epochs}", rate=rate)

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        shown = [name for name in ("accuracy", "rmse", "nll") if name in row]
        self._bar.update(self._task, scores="  ".join(f"{name} {row[name]:.4f}" for name in shown))

    def ended(self) -> None:
        self._bar.stop()


@final
class TensorBoard(Watcher):
    """Every number of the log as a curve over epochs."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidValue("TensorBoard needs tensorboard: pip install credo[experiments].") from error
        self._writer: Any = SummaryWriter(str(folder))

    def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
        """A resumed run writes on; TensorBoard keeps the later of two values for one epoch."""
        self._writer.add_text("run", title)

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "epoch" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["epoch"])
        self._writer.flush()

    def ended(self) -> None:
        self._writer.close()
