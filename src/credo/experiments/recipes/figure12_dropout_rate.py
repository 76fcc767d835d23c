"""Figures 12 and 13: MC-dropout's sensitivity to the dropout rate."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Published, Recipe, Row, Training
from credo.experiments.recipes import table1_imagenet as imagenet
from credo.experiments.recipes import table1_lenet5 as lenet5
from credo.experiments.recipes.numbers import gaps

LENET5: Final = replace(
    lenet5.PAPER, method="mc_dropout", settings={"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
)
LENET5_ON_CPU: Final = replace(
    lenet5.CPU, method="mc_dropout", settings={"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}
)
RESNET18: Final = replace(
    imagenet.PAPER, method="mc_dropout", settings=imagenet.SGD_SETTINGS, warmup_from=1.25e-2
)
RESNET18_ON_CPU: Final = replace(imagenet.CPU, method="mc_dropout", settings=imagenet.SGD_ON_CPU)


def with_rate(training: Training, rate: float) -> Training:
    return replace(training, model_options={**training.model_options, "dropout": rate})


def row(paper: Training, cpu: Training, rate: float, published: Published) -> Row:
    return Row(f"dropout-{rate}", with_rate(paper, rate), with_rate(cpu, rate), published)


RECIPES: Final = (
    Recipe(
        "figure12-dropout-lenet5",
        title="MC-dropout and the dropout rate",
        source="Figure 12: LeNet-5 on CIFAR-10",
        rows=(
            row(LENET5, LENET5_ON_CPU, 0.01, gaps(accuracy=10.3, nll=0.34)),
            row(LENET5, LENET5_ON_CPU, 0.1, gaps(accuracy=1.4, nll=0.04)),
            row(LENET5, LENET5_ON_CPU, 0.2, gaps(accuracy=-7.71, nll=-0.02)),
        ),
        figures=("sensitivity", "training_curves"),
        note=(
            "Paper: gaps between train and test, the train side with dropout on. CPU size: all of CIFAR-10, 10 epochs "
            "instead of 210, lr 1e-2 instead of 1e-3; gaps open with training and are smaller after 10 epochs."
        ),
    ),
    Recipe(
        "figure13-dropout-imagenet",
        title="MC-dropout and the dropout rate",
        source="Figure 13: ResNet-18 on ImageNet",
        rows=(
            row(RESNET18, RESNET18_ON_CPU, 0.05, imagenet.MC_DROPOUT.published),
            row(RESNET18, RESNET18_ON_CPU, 0.1, {}),
        ),
        figures=("sensitivity", "training_curves"),
        note=f"Paper: 0.1 is said to perform badly, without a number. {imagenet.SHRUNK}",
    ),
)
