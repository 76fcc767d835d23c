"""Figure 3a: what momentum and BatchNorm do for VOGN, ResNet-18 on CIFAR-10."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes.table1_resnet18 import CPU, PAPER, VOGN_ON_CPU, VOGN_SETTINGS

FULL: Final = replace(PAPER, method="vogn", settings=VOGN_SETTINGS)
FULL_ON_CPU: Final = replace(CPU, method="vogn", settings={**VOGN_ON_CPU, "momentum": 0.9})


def without(full: Training, *, momentum: bool, batch_norm: bool) -> Training:
    """The same training with one or both left out."""
    settings = full.settings if momentum else {**full.settings, "momentum": 0.0}
    options = full.model_options if batch_norm else {**full.model_options, "batch_norm": False}
    return replace(full, settings=settings, model_options=options)


def row(name: str, *, momentum: bool, batch_norm: bool) -> Row:
    return Row(
        name,
        paper=without(FULL, momentum=momentum, batch_norm=batch_norm),
        cpu=without(FULL_ON_CPU, momentum=momentum, batch_norm=batch_norm),
    )


RECIPES: Final = (
    Recipe(
        "figure3-momentum-batchnorm",
        title="VOGN with and without momentum and BatchNorm",
        source="Figure 3a: ResNet-18 on CIFAR-10",
        rows=(
            row("momentum-batchnorm", momentum=True, batch_norm=True),
            row("batchnorm", momentum=False, batch_norm=True),
            row("momentum", momentum=True, batch_norm=False),
            row("neither", momentum=False, batch_norm=False),
        ),
        figures=("training_curves",),
        note=(
            "Paper: curves only, no numbers in its text. Nothing but the named part changes: the learning rate is "
            "not retuned without momentum, and without BatchNorm the convolutions have biases. "
            "CPU size: as table1-resnet18."
        ),
    ),
)
