"""What can be measured: something that is prepared once for a problem and then steps."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from benchmarks.cases import Problem

LEARNING_RATE = 1e-6  # large enough to do the work, small enough that every step sees the same weights
DATA_SIZE = 50_000


class Absent(Exception):
    """The contender cannot be measured here, because something is not installed or not written yet."""


@dataclass(frozen=True)
class Running:
    """A prepared contender. `squares` is read after a step, outside of the timed region: name → Σᵢgᵢ²."""

    step: Callable[[], object]
    squares: Callable[[], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    prepare: Callable[[Problem], Running]
    peer: bool = False


def short_reason(error: BaseException, length: int = 80) -> str:
    """One line that a table can hold: how the message of the error begins."""
    if isinstance(error, (Absent, ImportError)):
        return f"absent: {error}"[:length]
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    message = "raises: " + re.sub(r"^\[\w+Error\(.", "", first)  # Opacus puts its errors into a list
    return message if len(message) <= length else message[: length - 1] + "…"
