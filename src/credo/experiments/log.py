"""The log of a run: one JSON line an epoch.

    epoch, lr, tempering              after the epoch; lr and τ of its last step, τ null where there is none
    train_accuracy, train_nll         from the forward passes of training itself, as the weights went by: with dropout
                                      on, at samples of the weights for VOGN; no further pass over the training data
    accuracy, nll, brier, ece, auroc  of `credo.predict` on the test data (rmse and nll for regression)
    refused                           steps so far that were refused as not finite
    seconds                           of training in this epoch, evaluation and checkpoints left out

Of these `seconds` alone (TIMES) depends on anything but the recipe and the seed. What is not a number is null.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from credo.errors import IntegrityError
from credo.posterior.files import write_atomically

TIMES: Final = frozenset({"seconds"})
LogRow = dict[str, Any]


def write_log(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All rows at once, atomically: a resumed run takes back what was logged after its checkpoint."""
    write_atomically(path, "".join(f"{to_json(row)}\n" for row in rows).encode())


def read_log(path: Path) -> list[LogRow]:
    """The rows; undefined numbers are NaN, except the tempering of a method without one."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            rows.append(revived(json.loads(line)))
        except ValueError as error:
            raise IntegrityError(f"{path}:{number} is no line of JSON: {error}") from error
    return rows


def without_times(row: Mapping[str, Any]) -> LogRow:
    return {name: value for name, value in row.items() if name not in TIMES}


def to_json(value: object, indent: int | None = None) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def revived(row: Mapping[str, Any]) -> LogRow:
    return {name: math.nan if value is None and name != "tempering" else value for name, value in row.items()}


def finite(value: Any) -> Any:
    """As JSON can hold it: mappings with names, lists, and None for what is no finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
