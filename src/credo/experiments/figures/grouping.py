"""Results of one recipe and size, by row, and what several seeds have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from credo.experiments.recipes import RECIPES
from credo.experiments.results import Result

Array = NDArray[numpy.float64]


def by_row(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Seeds together, rows in the recipe's order; rows that it does not know come last, as they were given."""
    recipe = RECIPES.get(results[0].recipe) if results else None
    order = [row.name for row in recipe.rows] if recipe else []
    found: dict[str, list[Result]] = {name: [] for name in order}
    for result in results:
        found.setdefault(result.row, []).append(result)
    return {row: group for row, group in found.items() if group}


def column(log: Sequence[Mapping[str, Any]], name: str) -> Array:
    """One number an epoch; NaN where it is missing or not a number."""
    values = [row.get(name) for row in log]
    return numpy.array([numpy.nan if value is None else float(value) for value in values])


def over_seeds(results: Sequence[Result], name: str) -> Array:
    """(seeds, epochs), as many epochs as all seeds have."""
    columns = [column(result.log, name) for result in results]
    epochs = min(len(values) for values in columns)
    return numpy.stack([values[:epochs] for values in columns])
