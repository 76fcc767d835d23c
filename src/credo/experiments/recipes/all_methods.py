"""Every method there is, side by side on one small problem. No table of the paper; the door is the same for all.

Each has the defaults of its class, or a setting that trains in so few epochs; none was tuned against the others.
"""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Setting, Training

LENET: Final = Training("adam", "lenet5", "cifar10", epochs=10, batch_size=128, milestones=(8,))
DIGITS: Final = Training(
    "adam", "mlp", "digits", epochs=40, batch_size=32, milestones=(30,), held_out_classes=(8, 9)
)


def row(name: str, base: Training, settings: dict[str, Setting], dropout: float = 0.0) -> Row:
    model: dict[str, Setting] = {"dropout": dropout} if dropout else {}
    chosen = replace(base, method=name.replace("-", "_"), settings=settings, model_options=model)
    return Row(name, paper=None, cpu=chosen)


def rows(base: Training) -> tuple[Row, ...]:
    return (
        row("sgd", base, {"lr": 1e-2}),
        row("adam", base, {"lr": 1e-3}),
        row("mc-dropout", base, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}, dropout=0.1),
        row("bbb", base, {"lr": 1e-3, "initial_log_variance": -9.0}),
        row("ivon", base, {}),
        row("kfac", base, {}),
        row("noisy-kfac", base, {}),
        row("ogn", base, {}),
        row("vogn", base, {}),
    )


RECIPES: Final = (
    Recipe(
        "methods-lenet5",
        title="Every method: LeNet-5 on CIFAR-10",
        source="credo's own comparison",
        rows=rows(LENET),
        figures=("training_curves", "calibration_curves", "reliability"),
        note="Ten epochs with defaults: a check that every method trains, no ranking of methods.",
    ),
    Recipe(
        "methods-digits",
        title="Every method: handwritten digits, 8 and 9 unfamiliar",
        source="credo's own comparison",
        rows=rows(DIGITS),
        figures=("training_curves", "calibration_curves", "entropy_histograms"),
        note="Forty epochs on all training images with defaults: a check that every method trains, no ranking.",
    ),
)
