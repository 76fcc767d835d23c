"""What is kept of a finished run where weights would be too much: one small file of JSON lines.

    kind "run"          recipe, row, size, seed, training, versions, commit, kernels, machine, times, changes
    kind "epoch"        a line of the log, one for each epoch
    kind "final"        scores "as_trained" and "after_temperature", and how T was fitted; for regression "after_noise",
                        with the variance of the observations fitted instead, in the units of the data; where the
                        recipe keeps such data, "validation" scores as trained, to choose settings by; of a stream of
                        tasks its scores and their "matrix", and there is nothing more
    kind "ood"          one for each unfamiliar set: its scores as trained and after the same temperature
    kind "calibration"  confidence, accuracy and examples of each bin, as trained and after
    kind "entropy"      how many predictions of the test data and of each unfamiliar set lie in each bin of the entropy

It is a function of the run folder alone: it can be made again at any time. Undefined numbers are null.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from credo import metrics
from credo.errors import CredoError, IntegrityError, VersionError
from credo.experiments.names import plain_name
from credo.experiments.recalibration import (
    cross_fitted,
    cross_fitted_noise,
    fit_noise,
    fit_temperature,
    gaussian_nll,
    scaled,
)
from credo.experiments.recipe import Training
from credo.experiments.results import Result, load_result
from credo.experiments.run_folder import DEFAULTS, RunFolder, RunName, described, described_stream, to_json
from credo.posterior.files import write_atomically

FORMAT: Final = 1
FOLDS: Final = "test data, each tenth by the others"
ENTROPY_BINS: Final = 40
KEPT: Final = ("versions", "commit", "kernels", "machine", "started", "changes")
RecordLine = dict[str, Any]


def record_path(results: str | PathLike[str], recipe: str, size: str, row: str, seed: int) -> Path:
    names = [plain_name(kind, name) for kind, name in (("recipe", recipe), ("size", size), ("row", row))]
    return Path(results, *names[:2], f"{names[2]}-seed-{seed}.jsonl")


def write_record(folder: str | PathLike[str], path: Path) -> Path:
    """The record of the finished run in `folder`, atomically; the same bytes every time."""
    lines = record_of(load_result(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{to_json(line)}\n" for line in lines).encode())
    return path


def read_record(path: str | PathLike[str]) -> list[RecordLine]:
    """All lines, each with its "kind"; IntegrityError where the file is not what `write_record` writes."""
    lines: list[RecordLine] = []
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise IntegrityError(f"{path}:{number} is no line of JSON: {error}") from error
        if not isinstance(line, dict) or "kind" not in line:
            raise IntegrityError(f"{path}:{number} is no line of a record: it has no kind.")
        lines.append(line)
    kinds = [line["kind"] for line in lines]
    if kinds[:1] != ["run"] or "final" not in kinds:
        raise IntegrityError(f"{path} is cut off or no record: it must begin with kind run and have a final.")
    if lines[0]["format"] > FORMAT:
        raise VersionError(
            f"{path} has format {lines[0]['format']}, this credo reads up to {FORMAT}. Upgrade."
        )
    return lines


def is_recorded(path: str | PathLike[str], training: Training, seed: int, members: int = 0) -> bool:
    """Whether the record of just this run is there; its folder may be on another machine.

    What cannot be read, and the record of a run with other settings, are not it.
    """
    head = _head(path)
    if head is None or head["seed"] != seed or head.get("ensemble", 0) != members:
        return False
    saved = {**DEFAULTS, **head["training"]}  # a field may be younger than the run
    return all(saved.get(name) == value for name, value in _asked(training, seed).items())


def share_record(
    results: str | PathLike[str], path: Path, name: RunName, training: Training, seed: int
) -> str | None:
    """Write the record of a run that would be a finished one over again, from that one's; its name, None without one.

    It is the same training with the same seed under the name of another recipe or row. It may have met more
    unfamiliar sets: they are left out.
    """
    asked = _asked(training, seed)
    for other in sorted(Path(results).glob("*/*/*.jsonl")):
        head = _head(other)
        if head is None or head["seed"] != seed or "ensemble" in head or "same_as" in head:
            continue
        saved = {**DEFAULTS, **head["training"]}
        same = all(saved.get(key) == value for key, value in asked.items() if key != "ood")
        wanted, met = (set(found.get("ood", ())) for found in (asked, saved))
        if not same or not wanted <= met:
            continue
        source = other.relative_to(results).with_suffix("").as_posix()
        changed = {**asdict(name), "training": {**head["training"], **asked}, "same_as": source}
        lines = [{**head, **{key: changed[key] for key in ("recipe", "row", "size", "training", "same_as")}}]
        lines += [_without_sets(line, met - wanted) for line in read_record(other)[1:]]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{to_json(line)}\n" for line in lines if line).encode())
        return source
    return None


def _head(path: str | PathLike[str]) -> RecordLine | None:
    try:
        return read_record(path)[0]
    except (CredoError, OSError, UnicodeDecodeError):
        return None


def _asked(training: Training, seed: int) -> dict[str, Any]:
    """The settings of a run, as the head of its record has them under `training`."""
    if training.tasks is None:
        found = described(training)
    else:
        stream = described_stream(training, seed, RunName())
        found = {**stream["training"], "tasks": stream["tasks"]}
    return dict(json.loads(to_json(found)))


def _without_sets(line: RecordLine, sets: set[str]) -> RecordLine:
    """A line of a record, without what it says of these unfamiliar sets; empty if that is all."""
    if line["kind"] == "ood":
        return {} if line["data"] in sets else line
    if line["kind"] == "entropy":
        return {**line, "counts": {name: bins for name, bins in line["counts"].items() if name not in sets}}
    changed = dict(line)
    for part in {"as_trained", "after_temperature"} & line.keys() if line["kind"] == "final" else ():
        changed[part] = {k: v for k, v in line[part].items() if k.partition(".")[2] not in sets}
    return changed


def record_of(result: Result) -> list[RecordLine]:
    config = result.facts if result.is_stream else RunFolder(result.folder).read_config()
    head = {
        "kind": "run",
        "format": FORMAT,
        "recipe": result.recipe,
        "row": result.row,
        "size": result.size,
        "seed": result.seed,
        "training": dict(result.training),
        **{name: config.get(name) for name in KEPT},
    }
    if result.members:
        head["ensemble"] = len(result.members)
    if result.is_stream:
        return [head, {"kind": "final", "as_trained": dict(result.metrics), "matrix": result.facts["matrix"]}]
    epochs = [{"kind": "epoch", **row} for row in result.log]
    classes = result.training.get("task", "classification") == "classification"
    return [head, *epochs, *(_classified(result) if classes else _regressed(result))]


def _regressed(result: Result) -> list[RecordLine]:
    """Scores in the units of the data, whose targets were standardised; the noise stays in standard units."""
    found = result.predictions()
    unit = float(result.facts["inputs"].get("target_std", 1.0))
    mean, epistemic, targets = (found[f"test.{name}"] for name in ("mean", "epistemic", "targets"))
    validation: RecordLine = {}
    if "validation.targets" in found:
        held_out = [found[f"validation.{name}"] for name in ("mean", "epistemic", "targets")]
        fitted_on, values = "validation", [fit_noise(*held_out)]
        noise = torch.full((len(mean), 1), values[0], dtype=torch.float64)
        scores = regression_scores(held_out[0], found["validation.variance"], held_out[2], unit)
        validation = {"validation": scores}
    else:
        fitted_on = FOLDS
        noise, values = cross_fitted_noise(mean, epistemic, targets)
    final = {
        "kind": "final",
        "as_trained": {**result.metrics, **regression_scores(mean, found["test.variance"], targets, unit)},
        "after_noise": regression_scores(mean, epistemic.double() + noise, targets, unit),
        **validation,
        "noise_variances": values,
        "fitted_on": fitted_on,
        "target_std": unit,
        "examples": len(targets),
    }
    return [final]


def regression_scores(mean: Tensor, variance: Tensor, targets: Tensor, unit: float) -> dict[str, float]:
    """RMSE and NLL of targets that are `unit` times what is stored."""
    away = (mean.double() - targets.reshape(mean.shape).double()).square()
    outputs = mean.flatten(1).shape[1]
    return {
        "rmse": unit * float(away.mean().sqrt()),
        "nll": gaussian_nll(mean, variance, targets) + outputs * math.log(unit),
    }


def _classified(result: Result) -> list[RecordLine]:
    found = result.predictions()
    targets, before = found["test.targets"], _log_probs(found, "test")
    if "validation.targets" in found:
        fitted_on = "validation"
        temperature = fit_temperature(_log_probs(found, "validation"), found["validation.targets"])
        temperatures, after = [temperature], scaled(before, temperature)
    else:
        fitted_on = FOLDS
        after, temperatures = cross_fitted(before, targets)
        temperature = fit_temperature(before, targets)  # for the unfamiliar sets, whose classes are not known
    validation = {}
    if "validation.targets" in found:
        scores = class_scores(_log_probs(found, "validation"), found["validation.targets"])
        validation = {"validation": scores}
    final = {
        "kind": "final",
        "as_trained": {**result.metrics, **class_scores(before, targets)},
        "after_temperature": class_scores(after, targets),
        **validation,
        "temperatures": temperatures,
        "fitted_on": fitted_on,
        "examples": len(targets),
    }
    calibration = {
        "kind": "calibration",
        "as_trained": curve(before, targets),
        "after_temperature": curve(after, targets),
    }
    names = _unfamiliar(found)
    ood = [_ood(name, before, _log_probs(found, f"ood.{name}"), temperature) for name in names]
    return [final, *ood, calibration, _entropies(found, names)]


def class_scores(log_probs: Tensor, targets: Tensor) -> dict[str, float]:
    """The NLL from the logarithms: a probability may be too small for its dtype."""
    probs = log_probs.double().exp()
    functions = {name: getattr(metrics, name) for name in ("accuracy", "brier", "ece", "auroc")}
    found = {name: function(probs, targets) for name, function in functions.items()}
    nll = -log_probs.double().gather(1, targets[:, None]).mean().item()
    return {**found, "nll": nll, "ece_15_bins": metrics.ece(probs, targets, bins=15)}


def curve(log_probs: Tensor, targets: Tensor) -> dict[str, list[float]]:
    found = metrics.calibration_curve(log_probs.double().exp(), targets)
    return {name: getattr(found, name).tolist() for name in ("confidence", "accuracy", "examples")}


def _ood(name: str, familiar: Tensor, other: Tensor, temperature: float) -> RecordLine:
    after = [scaled(log_probs, temperature) for log_probs in (familiar, other)]
    return {
        "kind": "ood",
        "data": name,
        "examples": len(other),
        "as_trained": _told_apart(familiar, other),
        "after_temperature": _told_apart(*after),
    }


def _told_apart(familiar: Tensor, other: Tensor) -> dict[str, float]:
    inside, outside = familiar.double().exp(), other.double().exp()
    return {
        "auroc": metrics.ood_auroc(inside, outside),
        "fpr95": metrics.fpr_at_tpr(inside, outside, tpr=0.95),
    }


def _entropies(found: dict[str, Tensor], names: Iterable[str]) -> RecordLine:
    classes = found["test.probs"].shape[1]
    highest = torch.tensor(float(classes), dtype=torch.float64).log().item()

    def histogram(part: str) -> list[int]:
        entropy = found[f"{part}.entropy"].double().clamp(0, highest)
        counts: list[int] = torch.histc(entropy, ENTROPY_BINS, 0, highest).long().tolist()
        return counts

    counts = {"test": histogram("test"), **{name: histogram(f"ood.{name}") for name in names}}
    return {"kind": "entropy", "from": 0.0, "to": highest, "bins": ENTROPY_BINS, "counts": counts}


def _unfamiliar(found: dict[str, Tensor]) -> list[str]:
    return sorted(
        name.removeprefix("ood.").removesuffix(".probs")
        for name in found
        if name.startswith("ood.") and name.endswith(".probs") and not name.endswith(".log_probs")
    )


def _log_probs(found: dict[str, Tensor], part: str) -> Tensor:
    """As predicted; of a run from before they were stored, the logarithm of what is at least the smallest number."""
    stored = found.get(f"{part}.log_probs")
    if stored is not None:
        return stored
    probs = found[f"{part}.probs"]
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
