"""Figures 5, 15, 16 and 17: predictive entropy on CIFAR-10 and on SVHN, LSUN (crop) and LSUN (resize)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import table1_alexnet, table1_lenet5, table1_resnet18

UNFAMILIAR: Final = ("svhn", "lsun_crop", "lsun_resize")
ON_CPU: Final = ("svhn", "tinyimagenet_resize")  # can be fetched everywhere, and small
METHODS: Final = ("adam", "mc-dropout", "vogn")


def tested(training: Training | None, unfamiliar: tuple[str, ...]) -> Training | None:
    return None if training is None else replace(training, ood=unfamiliar)


def rows(table: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of a table, tested on unfamiliar inputs too."""
    chosen = [row for row in table if row.name in METHODS]
    return tuple(
        replace(row, paper=tested(row.paper, UNFAMILIAR), cpu=tested(row.cpu, ON_CPU)) for row in chosen
    )


def recipe(number: int, network: str, title: str, table: Recipe) -> Recipe:
    return Recipe(
        f"figure{number}-ood-{network}",
        title=f"Unfamiliar inputs: {title}",
        source=f"Figure {number}",
        rows=rows(table.rows),
        figures=("entropy_histograms",),
        note=(
            f"Training and published accuracies as in {table.name}. Paper: AUROC and FPR at 95 % TPR stand only inside "
            "its pictures; it tests on SVHN's training images, we on its test images. "
            f"CPU size: as {table.name}, and TinyImageNet (resize) in place of the two LSUN sets."
        ),
    )


RECIPES: Final = (
    recipe(5, "resnet18", "ResNet-18 on CIFAR-10", table1_resnet18.RECIPES[0]),
    recipe(15, "alexnet-augmented", "AlexNet on CIFAR-10, with augmentation", table1_alexnet.RECIPES[1]),
    recipe(16, "alexnet", "AlexNet on CIFAR-10, no augmentation", table1_alexnet.RECIPES[0]),
    recipe(17, "lenet5", "LeNet-5 on CIFAR-10, no augmentation", table1_lenet5.RECIPES[0]),
)
