"""`credo predict`: a saved run on new inputs, as a CSV."""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from credo.cli.exits import OK
from credo.cli.inputs import Inputs, in_range, read_inputs
from credo.errors import InvalidValue
from credo.experiments.results import Result, load_result
from credo.posterior.files import write_atomically
from credo.predict import Prediction
from credo.predict import predict as predicted

COLUMNS = ("input", "class", "probability", "entropy", "mutual_information")


def predict(run: Path, inputs: Path, out: Path, samples: int | None, seed: int, batch_size: int) -> int:
    result = _finished(run)
    stored = result.facts["inputs"]
    given = read_inputs(inputs, tuple(stored["shape"]))
    model, normalise = result.model(), result.normalise()
    values, note = in_range(given.values, normalise)
    batches = (normalise(part) for part in torch.split(values, _positive("--batch-size", batch_size)))
    count = result.training["samples"] if samples is None else _positive("--samples", samples)
    prediction = predicted(model, result.belief(model), batches, samples=count, seed=seed)
    text = as_csv(given, prediction, stored["classes"])
    if note:
        print(f"{inputs} was read as {note}", file=sys.stderr)
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        write_atomically(out, text.encode())
        print(f"{len(given.names):,} inputs → {out}", file=sys.stderr)
    return OK


def as_csv(inputs: Inputs, prediction: Prediction, classes: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_lines(inputs, prediction, classes))
    return text.getvalue()


def _lines(inputs: Inputs, prediction: Prediction, classes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    best, at = prediction.probs.max(-1)
    numbers = zip(
        best.tolist(), prediction.entropy.tolist(), prediction.mutual_information.tolist(), strict=True
    )
    for name, k, values in zip(inputs.names, at.tolist(), numbers, strict=True):
        yield name, str(classes[k]) if classes else str(k), *(f"{value:.6g}" for value in values)


def _finished(run: Path) -> Result:
    if not run.exists():
        raise FileNotFoundError(f"there is no run folder {run}")
    result = load_result(run)
    if result.training["task"] != "classification":
        raise InvalidValue(
            f"{run} is a regression; the command line predicts classes, credo.predict in Python both"
        )
    return result


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidValue(f"{name} must be at least 1, got {value}")
    return value
