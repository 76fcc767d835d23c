"""What a search has found: its trials, the best of them, and the lines to paste."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.optim import Optimizer

from credo.errors import InvalidValue
from credo.experiments.methods import FACTORS, FOR_THE_TASK, method_of
from credo.experiments.recipe import Setting, Training
from credo.experiments.tasks import task_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STATES: Final = {"COMPLETE": "complete", "PRUNED": "dropped early", "FAIL": "failed"}
CLASSES: Final = {
    "vogn": "credo.VOGN",
    "ogn": "credo.OGN",
    "ivon": "credo.IVON",
    "bbb": "credo.BayesByBackprop",
    "kfac": "credo.KFAC",
    "noisy_kfac": "credo.NoisyKFAC",
    "adam": "torch.optim.Adam",
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "mc_dropout": "torch.optim.SGD",
}


@dataclass(frozen=True)
class TrialRecord:
    """One trial that counts; the first has the defaults."""

    number: int
    state: str  # "complete", "dropped early" or "failed"
    nll: float  # of the validation data at its end; NaN if it failed
    settings: Mapping[str, Setting]
    model_options: Mapping[str, Setting]
    scores: Mapping[str, float]
    epochs: int  # the last that was judged
    seconds: float
    reason: str = ""  # why it failed


def record(number: int, trial: "FrozenTrial") -> TrialRecord:
    attributes = trial.user_attrs
    return TrialRecord(
        number=number,
        state=STATES[trial.state.name],
        nll=math.nan if trial.value is None else trial.value,
        settings=attributes.get("settings", {}),
        model_options=attributes.get("model_options", {}),
        scores=attributes.get("scores", {}),
        epochs=trial.last_step or 0,
        seconds=0.0 if trial.duration is None else trial.duration.total_seconds(),
        reason=attributes.get("reason", ""),
    )


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search."""

    base: Training  # the defaults
    trials: tuple[TrialRecord, ...]
    folder: Path
    study: Any  # optuna's, with these trials, for plots of one's own

    @property
    def best(self) -> TrialRecord:
        """The complete trial with the least NLL on the validation data."""
        return min(self.complete, key=lambda t: t.nll)

    @property
    def complete(self) -> list[TrialRecord]:
        return [t for t in self.trials if t.state == "complete"]

    @property
    def defaults(self) -> TrialRecord:
        return self.trials[0]

    @property
    def training(self) -> Training:
        """That of the best trial."""
        return replace(self.base, settings=self.best.settings, model_options=self.best.model_options)

    @property
    def verdict(self) -> str:
        """The best beside the defaults, and how much of the difference the choice of validation examples may make."""
        best, first = self.best, self.defaults
        error = best.scores.get("nll_error", math.nan)
        words = (
            f"The best of {len(self.trials)} trials is number {best.number}: validation NLL {best.nll:.4f}"
        )
        words += f" (standard error {error:.4f})" if math.isfinite(error) else ""
        return words + (
            f", the defaults {first.nll:.4f}." if math.isfinite(first.nll) else ", the defaults failed."
        )

    @property
    def constructor(self) -> str:
        """The lines to paste."""
        return constructor(self.training)

    def optimizer(self, model: nn.Module, *, data_size: int, seed: int = 0) -> Optimizer:
        """A fresh optimiser for this model, with the numbers that were found."""
        training = self.training
        method = method_of(training.method)
        task = task_of(training.task, float(training.settings.get("noise_variance", 1.0)))
        return method.build(model, task, data_size=data_size, seed=seed, settings=training.settings).optimizer

    def table(self, best: int = 5) -> str:
        """The best trials as text, the defaults among them, and what became of the others."""
        ranked = sorted(self.complete, key=lambda t: t.nll)
        shown = ranked[:best]
        if self.defaults not in shown:
            shown.append(self.defaults)
        return "\n".join([*aligned([HEADER, *[cells(t, self.base) for t in shown]]), *self._others()])

    def _others(self) -> list[str]:
        dropped = sum(t.state == "dropped early" for t in self.trials)
        failed = [t for t in self.trials if t.state == "failed"]
        ends = f"{len(self.complete)} complete, {dropped} dropped early, {len(failed)} failed"
        return [
            self.verdict,
            f"{len(self.trials)} trials: {ends}",
            *[f"trial {t.number} failed: {t.reason}" for t in failed[:3]],
        ]


HEADER: Final = ("trial", "NLL", "accuracy", "numbers")


def cells(trial: TrialRecord, base: Training) -> tuple[str, str, str, str]:
    accuracy = trial.scores.get("accuracy")
    changed = changes(trial, base)
    words = ", ".join(f"{name}={value}" for name, value in changed.items())
    return (
        str(trial.number),
        f"{trial.nll:.4f}" if math.isfinite(trial.nll) else trial.state,
        "" if accuracy is None else f"{100 * accuracy:.1f} %",
        words or "the defaults",
    )


def changes(trial: TrialRecord, base: Training) -> dict[str, Setting]:
    """What differs from the defaults."""
    found = [(trial.settings, base.settings), (trial.model_options, base.model_options)]
    return {name: value for own, other in found for name, value in own.items() if other.get(name) != value}


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def constructor(training: Training) -> str:
    """The optimiser of a training as Python. What the method chooses by itself is multiplied after construction."""
    method, settings = training.method, dict(training.settings)
    own = method in ("vogn", "ogn", "ivon", "bbb", "kfac", "noisy_kfac")
    factors = {name.removesuffix("_factor"): settings.pop(name) for name in FACTORS if name in settings}
    for name in FOR_THE_TASK:
        settings.pop(name, None)
    if "beta1" in settings or "beta2" in settings:
        options = method_of(method).options
        betas = tuple(settings.pop(name, options[name]) for name in ("beta1", "beta2"))
        settings["betas"] = betas  # type: ignore[assignment]
    if method in ("sgd", "mc_dropout"):
        settings.setdefault("momentum", 0.9)  # a recipe's default, not torch's
    if not own:
        settings.setdefault("lr", method_of(method).options["lr"])  # type: ignore[arg-type]
    given = ["model", "data_size=len(train_set)"] if own else ["model.parameters()"]
    arguments = ", ".join([*given, *[f"{name}={value!r}" for name, value in settings.items()]])
    lines = [f"optimizer = {CLASSES[method]}({arguments})"]
    if factors:
        lines.append("for group in optimizer.param_groups:")
        lines += [f'    group["{name}"] *= {value!r}' for name, value in factors.items()]
    if not own and settings.get("weight_decay"):
        lines.append("# normalisation layers had no weight decay")
    if training.model_options:
        options_text = ", ".join(f"{name}={value!r}" for name, value in training.model_options.items())
        lines.append(f"# the model was built with {options_text}")
    return "\n".join(lines)


def outcome(base: Training, finished: "Sequence[FrozenTrial]", folder: Path) -> Tuned:
    """An error if no trial is complete: then there is nothing to choose from."""
    trials = tuple(record(k, trial) for k, trial in enumerate(finished))
    if not any(t.state == "complete" for t in trials):
        first = next((t.reason for t in trials if t.reason), "")
        raise InvalidValue(
            f"none of {len(trials)} trials is complete; trial 0, the defaults, failed: {first} They are kept in "
            f"{folder}. Look at the data and the model, or set a lower lr, and choose another folder."
        )
    return Tuned(base, trials, folder, in_memory(finished))


def in_memory(finished: "Sequence[FrozenTrial]") -> Any:
    """A study of these trials alone, numbered as here: the stored one also has those that were interrupted."""
    import optuna

    study = optuna.create_study(direction="minimize")
    study.add_trials(finished)
    return study
