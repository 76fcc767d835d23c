"""Table 1, ResNet-18 on CIFAR-10 with augmentation; curves in Figures 4, 7d and 14."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Setting, Training
from credo.experiments.recipes.published import table

PUBLISHED: Final = table(
    """
    adam        97.74±0.140  0.059±0.012  86.00±0.257  0.55±0.01    0.082±0.002  0.877±0.001  160  11.97
    mc-dropout  88.23±0.243  0.317±0.045  82.85±0.208  0.51±0.0     0.166±0.025  0.768±0.004  161  12.51
    vogn        91.62±0.07   0.263±0.051  84.27±0.195  0.477±0.006  0.040±0.002  0.876±0.002  161  53.14
    """
)

PAPER: Final = Training(
    "adam",
    "resnet18",
    "cifar10",
    model_options={"stem": "imagenet", "xavier": True},
    epochs=161,
    batch_size=256,
    augment=True,
    milestones=(80, 120),
)
CPU: Final = replace(
    PAPER,
    epochs=10,
    milestones=(),
    batch_size=128,
    model_options={"stem": "imagenet", "width": 32},
    train_size=10_000,
    test_size=5_000,
)

ADAM: Final = Row(
    "adam",
    paper=replace(PAPER, settings={"lr": 1e-3, "weight_decay": 5e-4}, epochs=160),
    cpu=replace(CPU, settings={"lr": 1e-3}),
    published=PUBLISHED["adam"],
)

MC_DROPOUT: Final = Row(
    "mc-dropout",
    paper=replace(
        PAPER,
        method="mc_dropout",
        settings={"lr": 1e-1, "momentum": 0.9, "weight_decay": 1e-4},
        model_options={**PAPER.model_options, "dropout": 0.1},
    ),
    cpu=replace(
        CPU,
        method="mc_dropout",
        settings={"lr": 1e-1, "momentum": 0.9, "weight_decay": 1e-4},
        model_options={**CPU.model_options, "dropout": 0.1},
    ),
    published=PUBLISHED["mc-dropout"],
)

VOGN_SETTINGS: Final[dict[str, Setting]] = {
    "lr": 1e-4,
    "momentum": 0.9,
    "ema_rate": 0.999,
    "prior_precision": 50.0,
    "damping": 1e-3,
    "tempering": 1.0,
    "mc_samples": 5,
    "mc_slices": 8,
}
VOGN_ON_CPU: Final[dict[str, Setting]] = {"lr": 1e-3, "damping": 1e-2, "prior_precision": 1.0}

VOGN: Final = Row(
    "vogn",
    paper=replace(PAPER, method="vogn", settings=VOGN_SETTINGS),
    cpu=replace(CPU, method="vogn"),
    published=PUBLISHED["vogn"],
)

VOGN_DEFAULTS: Final = Row(
    "vogn-defaults",
    paper=replace(PAPER, method="vogn"),
    cpu=replace(CPU, method="vogn"),
    published=VOGN.published,
)

RECIPES: Final = (
    Recipe(
        "table1-resnet18",
        title="ResNet-18 on CIFAR-10, with augmentation",
        source="Table 1; sd in Table 3, curves in Figures 4, 7d, 14",
        rows=(ADAM, MC_DROPOUT, VOGN, VOGN_DEFAULTS),
        figures=("training_curves", "calibration_curves", "reliability"),
        note=(
            "The network is the one for ImageNet, 7×7 stem and pool, hence the accuracies. Paper: Table 5's δ̃ = 1e-3 "
            "is a slip for τδ/(ρN) = 1e-4. CPU size: width 32 instead of 64 (a quarter of the weights), "
            "10,000 training and 5,000 test images, batches of 128, 10 epochs without decay instead of 160, "
            "Adam without weight decay, VOGN with K = 1 and nothing set, as vogn-defaults is in the paper's size."
        ),
    ),
)
