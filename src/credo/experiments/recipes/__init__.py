"""All recipes, by name: the tables and figures of the paper, one file each, and the demonstration.

recipe("table1-lenet5").rows        # each with the paper's settings, a CPU size, and the published numbers
"""

from typing import Final

from credo.experiments.names import known, plain_name
from credo.experiments.recipe import Recipe
from credo.experiments.recipes import (
    all_methods,
    baselines_fashion,
    baselines_resnet20,
    digits,
    figure3_momentum_batchnorm,
    figure5_unfamiliar,
    figure8_prior_variance,
    figure11_samples,
    figure12_dropout_rate,
    table1_alexnet,
    table1_imagenet,
    table1_lenet5,
    table1_resnet18,
    uci,
)

FILES: Final = (
    digits,
    table1_lenet5,
    table1_alexnet,
    table1_resnet18,
    table1_imagenet,
    baselines_fashion,
    baselines_resnet20,
    uci,
    figure3_momentum_batchnorm,
    figure5_unfamiliar,
    figure8_prior_variance,
    figure11_samples,
    figure12_dropout_rate,
    all_methods,
)

RECIPES: Final[dict[str, Recipe]] = {recipe.name: recipe for file in FILES for recipe in file.RECIPES}


def recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown name is an error that lists them all, the nearest first."""
    return RECIPES[known("recipe", plain_name("recipe", name), RECIPES)]


__all__ = ["RECIPES", "recipe"]
