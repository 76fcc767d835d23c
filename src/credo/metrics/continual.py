"""How well a learner of task after task does: pure functions of its accuracy matrix.

`matrix[i][j]` is the accuracy on task j after training on the tasks 0 … i, so that row i needs its first i + 1
entries. What stands right of the diagonal (tasks not seen yet) is never read and may be NaN. Any score that
grows with quality will do in place of the accuracy, such as minus the error of a regression.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

Matrix: TypeAlias = Tensor | Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix) -> float:
    """1/T Σⱼ a[T−1][j]: over all tasks, at the end."""
    return average_accuracies(matrix)[-1]


def average_accuracies(matrix: Matrix) -> list[float]:
    """1/(i+1) Σ_{j≤i} a[i][j] after each task i: the curve that the paper draws."""
    return [sum(row[: i + 1]) / (i + 1) for i, row in enumerate(check_matrix(matrix))]


def backward_transfer(matrix: Matrix) -> float:
    """1/(T−1) Σ_{j<T−1} (a[T−1][j] − a[j][j]): what later tasks did to earlier ones. NaN for a single task."""
    rows = check_matrix(matrix)
    return _mean([rows[-1][j] - rows[j][j] for j in range(len(rows) - 1)])


def forgetting(matrix: Matrix) -> float:
    """1/(T−1) Σ_{j<T−1} (max_{j≤i<T−1} a[i][j] − a[T−1][j]): how far below its best each old task fell.

    It is negative where the last task still improved the old ones, and NaN for a single task.
    """
    rows = check_matrix(matrix)
    last = len(rows) - 1
    return _mean([max(rows[i][j] for i in range(j, last)) - rows[last][j] for j in range(last)])


def check_matrix(matrix: object) -> list[list[float]]:
    """The lower triangle, row i with i + 1 entries, all of them finite; or an error that says what is wrong."""
    if isinstance(matrix, Tensor):
        matrix = matrix.detach().to("cpu", torch.float64).tolist()
    if not isinstance(matrix, Sequence) or not all(
        isinstance(row, Sequence) and not isinstance(row, str) for row in matrix
    ):
        raise InvalidType(
            f"matrix is a {type(matrix).__name__}; give a (tasks, tasks) tensor or a list of rows of accuracies"
        )
    if not matrix:
        raise InvalidValue("matrix has no rows: no task was learnt, so there is nothing to measure")
    return [_row(i, row) for i, row in enumerate(matrix)]


def _row(i: int, row: Sequence[object]) -> list[float]:
    if len(row) < i + 1:
        raise InvalidValue(
            f"matrix[{i}] has {len(row)} entries; after task {i} there are {i + 1} tasks to score (0 … {i})"
        )
    entries = torch.tensor([row[: i + 1]], dtype=torch.float64)
    if not bool(entries.isfinite().all()):
        raise InvalidValue(
            f"matrix[{i}] is {list(row[: i + 1])}; the accuracies up to the diagonal must be finite"
        )
    return [float(entry) for entry in entries[0]]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
