"""A recipe of continual learning, run: all rows and seeds, then the table and the figure (`credo run permuted-mnist`).

Stopped at any moment, the same command goes on.
"""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from credo.data import load
from credo.experiments.continual import run
from credo.experiments.continual_recipe import ContinualRecipe, Size
from credo.experiments.continual_report import write_report
from credo.experiments.names import known
from credo.experiments.ranks import Ranks
from credo.experiments.recipes import permuted_mnist, split_mnist
from credo.experiments.run import seed_list

CONTINUAL: Final[dict[str, ContinualRecipe]] = {
    recipe.name: recipe for file in (permuted_mnist, split_mnist) for recipe in file.RECIPES
}


def continual_recipe_of(name: str) -> ContinualRecipe:
    """The recipe of that name; an unknown name is an error that lists them all, the nearest first."""
    return CONTINUAL[known("recipe", name, CONTINUAL)]


def run_stream(
    recipe: ContinualRecipe,
    *,
    size: Size = "cpu",
    only: Iterable[str] = (),
    seeds: int | Sequence[int] | None = None,
    out: str | PathLike[str],
    data_root: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """The rows (or `only` some) with every seed (the recipe's number of them, unless given); returns the table."""
    names = [row.name for row in recipe.rows]
    asked = [known(f"row of {recipe.name}:", name, names) for name in only] or names
    numbers = seed_list(recipe.seeds[size] if seeds is None else seeds)
    ranks, results = Ranks(), dict[str, list[dict[str, Any]]]()
    splits = ranks.each(lambda: load(recipe.data, data_root))
    for seed in numbers:
        for row in (row for row in recipe.rows if row.name in asked):
            result = run(recipe, row, size, seed, splits, Path(out))
            results.setdefault(row.name, []).append(result)
            score, seconds = 100 * result["average_accuracy"], result["seconds"]
            if ranks.is_first:
                say(f"{row.name} seed {seed}: {score:.2f} % in {seconds:.0f} s")
    return ranks.once(lambda: write_report(recipe, size, results, Path(out) / recipe.name / size))
