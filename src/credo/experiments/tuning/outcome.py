"""What a search has found: its trials, the best of them, the lines to paste, and the files that keep it."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.optim import Optimizer

from credo.errors import InvalidValue
from credo.experiments.methods import FACTORS, FOR_THE_TASK, method_of
from credo.experiments.page_style import PAGE_STYLE
from credo.experiments.recipe import Setting, Training
from credo.experiments.run_folder import to_json
from credo.experiments.tasks import task_of
from credo.posterior.files import write_atomically

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
    "swag": "torch.optim.SGD",
    "laplace": "torch.optim.AdamW",
}
AFTERWARDS: Final = {  # what makes a posterior of the weights that a torch optimiser finds
    "mc_dropout": "posterior = credo.DropoutPosterior(model)",
    "swag": "swag = credo.SWAG(model{rank}); after each epoch{collect_from} swag.collect(model), at the end "
    "swag.load_mean(model, loader) and posterior = swag.posterior()",
    "laplace": "posterior = credo.laplace(model, loader, {structure}{precision}{labels})",
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
        task = task_of(training)
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
    after = {name: settings.pop(name) for name in method_of(method).approximation_options if name in settings}
    if CLASSES[method] == "torch.optim.SGD":
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
    if method in AFTERWARDS:
        lines.append(f"# then: {afterwards(method, after)}")
    if training.model_options:
        options_text = ", ".join(f"{name}={value!r}" for name, value in training.model_options.items())
        lines.append(f"# the model was built with {options_text}")
    return "\n".join(lines)


def afterwards(method: str, options: Mapping[str, Setting]) -> str:
    """The words on how the posterior is made; recipes have defaults of their own."""
    if method == "swag":
        rank = f", rank={options['rank']}" if "rank" in options else ""
        first = options.get("collect_from", 1)
        return AFTERWARDS[method].format(rank=rank, collect_from=f" from {first} on" if first != 1 else "")
    if method == "laplace":
        precision = options.get("precision", "auto")
        return AFTERWARDS[method].format(
            structure=repr(options.get("structure", "last_layer")),
            precision="" if precision == "auto" else f", {precision!r}",
            labels=f", labels={options['labels']!r}" if "labels" in options else "",
        )
    return AFTERWARDS[method]


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


# The files of a search beside the study itself: a recipe for `credo run`, the best numbers, and the page

RECIPE, BEST, PAGE = "recipe.toml", "best.json", "tuning.html"


def write_files(tuned: Tuned, title: str, row: str | None = None) -> list[Path]:
    """`row`: of the recipe that is written; a model or data of the user's own cannot stand in one."""
    written = {BEST: best(tuned), PAGE: page(tuned, title)}
    if row is not None and isinstance(tuned.base.model, str) and isinstance(tuned.base.data, str):
        written[RECIPE] = recipe_text(tuned, title, row)
    for name, text in written.items():
        write_atomically(tuned.folder / name, text.encode())
    return [tuned.folder / name for name in written]


def best(tuned: Tuned) -> str:
    found = {
        "method": tuned.base.method,
        "settings": dict(tuned.best.settings),
        "model_options": dict(tuned.best.model_options),
        "constructor": tuned.constructor,
        "validation": {"best": dict(tuned.best.scores), "defaults": dict(tuned.defaults.scores)},
        "trials": len(tuned.trials),
    }
    return to_json(found, indent=1) + "\n"


def recipe_text(tuned: Tuned, title: str, row: str) -> str:
    """TOML, as `credo.experiments.recipe_file` reads it; everything stands in the row."""
    note = (
        f"Found by credo tune: the best of {len(tuned.trials)} trials by NLL on validation data, {tuned.best.nll:.4f}; "
        f"the defaults had {tuned.defaults.nll:.4f}."
    )
    head = {"name": f"{title.replace(' ', '-')}-tuned", "title": f"{title}, tuned", "note": note}
    body = {"name": row, **given(tuned.training)}
    lines = [f"{key} = {toml(value)}" for key, value in head.items()]
    return "\n".join([*lines, "", "[[rows]]", *[f"{key} = {toml(value)}" for key, value in body.items()], ""])


def given(training: Training) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    found = {}
    for field in fields(training):
        value = getattr(training, field.name)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if value is not None and value != usual:
            found[field.name] = value
    return found


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml(part) for part in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    return "{ " + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + " }"


# All of a search as one HTML page: the trials, the lines to paste and optuna's plots, with nothing to be fetched

PLOTS: Final = (  # optuna's name, our heading, and how many complete trials make it worth looking at
    ("plot_optimization_history", "NLL of the trials, in their order", 1),
    ("plot_intermediate_values", "NLL in the course of each trial", 1),
    ("plot_param_importances", "How much each number matters", 4),
    ("plot_slice", "NLL over each number", 2),
    ("plot_parallel_coordinate", "All numbers of each trial", 2),
)
WARNING: Final = "A NLL that is the least of many is a little too good: judge the found numbers on test data."
TABLE_STYLE: Final = (
    "pre { white-space: pre-wrap; padding: 0.8em; background: #8881; } table { margin-bottom: 1.5em; } "
    "td:nth-child(4), td:nth-child(5), th:nth-child(4), th:nth-child(5) { text-align: left; }"
)


def page(tuned: Tuned, title: str) -> str:
    heading = f"Tuning {title}: {tuned.base.method}"
    plots = "".join(plot_sections(tuned))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title>\n<style>{PAGE_STYLE}{TABLE_STYLE}</style>\n{script()}\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(heading)}</h1>\n<p>{escape(tuned.verdict)} {WARNING}</p>\n"
        f"<pre><code>{escape(tuned.constructor)}</code></pre>\n{grid(tuned)}\n{plots}</main>\n</body>\n</html>\n"
    )


def grid(tuned: Tuned) -> str:
    """Every trial, the best first."""
    order = {"complete": 0, "dropped early": 1, "failed": 2}
    ranked = sorted(tuned.trials, key=lambda t: (order[t.state], math.inf if math.isnan(t.nll) else t.nll))
    lines = []
    for t in ranked:
        number, nll, accuracy, words = cells(t, tuned.base)
        what = t.state if t.state != "failed" else f"failed: {t.reason}"
        shown = (number, nll, accuracy, words, what, f"{t.epochs}", f"{t.seconds:.1f}")
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in shown) + "</tr>")
    head = ("trial", "NLL", "accuracy", "numbers", "end", "epochs", "seconds")
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{''.join(lines)}</table>"


def script() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]

    return f"<script>{get_plotlyjs()}</script>"


def plot_sections(tuned: Tuned) -> Iterator[str]:
    from optuna import visualization
    from plotly.io import to_html  # type: ignore[import-untyped,unused-ignore]

    for name, caption, fewest in PLOTS:
        enough = len(tuned.complete) >= fewest
        figure = drawn(getattr(visualization, name), tuned.study) if enough else None
        if figure is not None:
            figure.update_layout(title=None, margin={"t": 30})
            figure.for_each_yaxis(named)
            body = to_html(figure, include_plotlyjs=False, full_html=False, div_id=name.removeprefix("plot_"))
            yield f"<h2>{escape(caption)}</h2>\n{body}\n"


def named(axis: Any) -> None:
    if axis.title.text in ("Objective Value", "Intermediate Value"):
        axis.title.text = "validation NLL"


def drawn(plot: Callable[[Any], Any], study: Any) -> Any:
    """None where the trials are too much alike for this plot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            figure = plot(study)
        except (ValueError, RuntimeError, ImportError, ZeroDivisionError):
            return None
    return figure if len(figure.data) else None
