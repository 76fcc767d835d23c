"""All recipes, by name: the tables and figures of the paper, the demonstration, comparisons, and streams of tasks.

recipe("table1-lenet5").rows        # each with the paper's settings, a CPU size, and the published numbers
"""

from typing import Final

from credo.experiments.names import known, plain_name
from credo.experiments.recipe import Recipe
from credo.experiments.recipes import (
    baselines,
    continual_mnist,
    demonstration,
    paper_figures,
    table1_cifar10,
    table1_imagenet,
)

FILES: Final = (
    demonstration,
    table1_cifar10,
    table1_imagenet,
    baselines,
    paper_figures,
    continual_mnist,
)

RECIPES: Final[dict[str, Recipe]] = {recipe.name: recipe for file in FILES for recipe in file.RECIPES}


def recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown name is an error that lists them all, the nearest first."""
    return RECIPES[known("recipe", plain_name("recipe", name), RECIPES)]


__all__ = ["RECIPES", "recipe"]
