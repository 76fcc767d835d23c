"""A recipe of continual learning from the command line: all rows and seeds, then the table and the figure.

    python -m credo.experiments.continual_command permuted-mnist --data DATA --out runs

Stopped at any moment, the same command goes on. `--rows vogn adam` and `--seeds 0 1` run a part.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from credo.data import load
from credo.experiments.continual import run
from credo.experiments.continual_recipe import ContinualRecipe
from credo.experiments.continual_report import write_report
from credo.experiments.names import known
from credo.experiments.recipes import permuted_mnist, split_mnist

RECIPES: Final[dict[str, ContinualRecipe]] = {
    recipe.name: recipe for file in (permuted_mnist, split_mnist) for recipe in file.RECIPES
}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    recipe = RECIPES[known("recipe", given.recipe, RECIPES)]
    names = [row.name for row in recipe.rows]
    rows = [known("row", name, names) for name in given.rows or names]
    seeds = given.seeds if given.seeds is not None else range(recipe.seeds[given.size])
    splits, results = load(recipe.data, given.data), dict[str, list[dict[str, Any]]]()
    for seed in seeds:
        for row in (row for row in recipe.rows if row.name in rows):
            result = run(recipe, row, given.size, seed, splits, given.out)
            results.setdefault(row.name, []).append(result)
            print(
                f"{row.name} seed {seed}: {100 * result['average_accuracy']:.2f} % in {result['seconds']:.0f} s"
            )
            sys.stdout.flush()
    print(write_report(recipe, given.size, results, given.out / recipe.name / given.size))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("credo.experiments.continual_command", description=__doc__)
    parser.add_argument("recipe", help=", ".join(RECIPES))
    parser.add_argument("--data", required=True, help="the folder that holds the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--size", choices=("cpu", "paper"), default="cpu")
    parser.add_argument("--rows", nargs="+", metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED")
    return parser


if __name__ == "__main__":
    main()
