"""Records below `results/` as results: what is known of a finished run when its folder is not there."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from credo.errors import IntegrityError, InvalidValue
from credo.experiments.records import RecordLine, read_record, record_path
from credo.experiments.results import Result
from credo.metrics import average_accuracies

SCALED = (
    "nll",
    "ece",
    "brier",
    "rmse",
)  # of these a table has a second column, after the temperature or the noise


@dataclass(frozen=True)
class StoredResult(Result):
    """A record. `folder` is the path of its file; weights and predictions are not kept."""

    lines: tuple[RecordLine, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """As of a run folder, as far as a record has them."""
        head = {name: value for name, value in self.lines[0].items() if name != "kind"}
        curve = next((line["as_trained"] for line in self.lines if line["kind"] == "calibration"), None)
        found = {**head, "metrics": dict(self.metrics), "curve": curve}
        matrix = next(line for line in self.lines if line["kind"] == "final").get("matrix")
        if matrix is not None:
            found |= {"matrix": matrix, "average_accuracies": average_accuracies(matrix)}
        return found


def load_records(folder: str | PathLike[str]) -> list[StoredResult]:
    """Every record below a folder, in the order of its path."""
    return [stored(path) for path in sorted(Path(folder).rglob("*.jsonl"))]


def stored(path: Path) -> StoredResult:
    lines = read_record(path)
    head, final = lines[0], next(line for line in lines if line["kind"] == "final")
    try:
        known = [head[name] for name in ("recipe", "size", "row", "seed")]
        training, scores = head["training"], _scores(final, lines)
    except KeyError as error:
        raise IntegrityError(f"{path} is no record of this credo: {error} is missing.") from error
    if path.parts[-3:] != record_path("", *known).parts:
        raise InvalidValue(f"{path} holds {record_path('', *known)}: a record must lie where its run says.")
    epochs = tuple(
        {k: v for k, v in line.items() if k != "kind"} for line in lines if line["kind"] == "epoch"
    )
    recipe, size, row, seed = known
    return StoredResult(recipe, row, size, seed, training, scores, epochs, path, lines=tuple(lines))


def _scores(final: RecordLine, lines: Sequence[RecordLine]) -> dict[str, float]:
    """One flat mapping: as trained, `<metric>_scaled` after temperature or noise, and unfamiliar sets by name."""
    trained = {name: _number(value) for name, value in final["as_trained"].items()}
    after = final.get("after_temperature") or final.get("after_noise") or {}
    found = trained | {f"{name}_scaled": _number(after[name]) for name in SCALED if name in after}
    temperatures = final.get("temperatures", ())
    if temperatures:
        found["temperature"] = sum(temperatures) / len(temperatures)
    for line in lines:
        if line["kind"] == "ood":
            found |= {f"ood_{name}.{line['data']}": _number(v) for name, v in line["as_trained"].items()}
    return found


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
