"""Table 1, ResNet-18 on ImageNet, and Figure 1, three of its lines; all curves in Figure 7e."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Setting, Training
from credo.experiments.recipes.published import table

PUBLISHED: Final = table(
    """
    sgd         82.63±0.058  0.675±0.017  67.79±0.017  1.38±0.0     0.067         0.856         90  44.13
    adam        80.96±0.098  0.723±0.015  66.39±0.168  1.44±0.01    0.064         0.855         90  44.40
    mc-dropout  72.96        1.12         65.64        1.43         0.012         0.856         90  45.86
    ogn         85.33±0.057  0.526±0.005  65.76±0.115  1.60±0.0     0.128±0.004   0.8543±0.001  90  63.13
    vogn        73.87±0.061  1.02±0.01    67.38±0.263  1.37±0.01    0.0293±0.001  0.8543±0.0    90  76.04
    kfac        83.73±0.058  0.571±0.016  66.58±0.176  1.493±0.006  0.158±0.005   0.842±0.005   60  133.69
    noisy-kfac  72.28        1.075        66.44        1.44         0.080         0.852         60  179.27
    """
)

IMAGES: Final = 1_281_167
AUGMENTATION: Final = 5  # ρ

PAPER: Final = Training(
    "sgd",
    "resnet18",
    "imagenet",
    model_options={"stem": "imagenet", "xavier": True},
    epochs=90,
    batch_size=4096,
    augment=True,
    milestones=(30, 60, 80),
    warmup_epochs=5,
)
KRONECKER: Final = replace(PAPER, epochs=60, milestones=(15, 30, 45), warmup_from=1.25e-5)
CPU: Final = Training(
    "sgd",
    "resnet18",
    "imagenette",
    model_options={"stem": "imagenet", "width": 16},
    epochs=10,
    batch_size=32,
    augment=True,
    train_size=1200,
)

SGD_SETTINGS: Final[dict[str, Setting]] = {"lr": 1.6, "momentum": 0.9, "weight_decay": 1e-4}
SGD_ON_CPU: Final[dict[str, Setting]] = {"lr": 3e-2, "momentum": 0.9, "weight_decay": 1e-4}
SHARED: Final[dict[str, Setting]] = {"lr": 1.6e-3, "momentum": 0.9, "damping": 1e-4}
VARIATIONAL: Final[dict[str, Setting]] = {**SHARED, "prior_precision": 133.3, "tempering": 1.0}
SLICES: Final[dict[str, Setting]] = {"mc_samples": 1, "mc_slices": 128}  # one sample a GPU


def prior_precision(l2: float) -> float:
    """δ with which δ̃ = δ/(ρN) is the given L2 coefficient."""
    return l2 * AUGMENTATION * IMAGES


SGD: Final = Row(
    "sgd",
    paper=replace(PAPER, settings=SGD_SETTINGS, warmup_from=1.25e-2),
    cpu=replace(CPU, settings=SGD_ON_CPU),
    published=PUBLISHED["sgd"],
)

ADAM: Final = Row(
    "adam",
    paper=replace(PAPER, method="adam", settings={"lr": 1.6e-3, "weight_decay": 1e-4}, warmup_from=1.25e-5),
    cpu=replace(CPU, method="adam", settings={"lr": 1e-3}),
    published=PUBLISHED["adam"],
)

MC_DROPOUT: Final = Row(
    "mc-dropout",
    paper=replace(
        PAPER,
        method="mc_dropout",
        settings=SGD_SETTINGS,
        warmup_from=1.25e-2,
        model_options={**PAPER.model_options, "dropout": 0.05},
    ),
    cpu=replace(
        CPU,
        method="mc_dropout",
        settings=SGD_ON_CPU,
        model_options={**CPU.model_options, "dropout": 0.05},
    ),
    published=PUBLISHED["mc-dropout"],
)

OGN: Final = Row(
    "ogn",
    paper=replace(
        PAPER,
        method="ogn",
        settings={**SHARED, "ema_rate": 0.9, "prior_precision": prior_precision(1e-5)},
        warmup_from=1.25e-5,
    ),
    cpu=replace(CPU, method="ogn"),
    published=PUBLISHED["ogn"],
)

VOGN: Final = Row(
    "vogn",
    paper=replace(
        PAPER, method="vogn", settings={**VARIATIONAL, **SLICES, "ema_rate": 0.999}, warmup_from=1.25e-5
    ),
    cpu=replace(CPU, method="vogn"),
    published=PUBLISHED["vogn"],
)

VOGN_RELEASED: Final = Row(
    "vogn-released",
    paper=replace(
        PAPER, method="vogn", settings={**VARIATIONAL, **SLICES, "ema_rate": 0.9}, warmup_from=1.25e-5
    ),
    cpu=None,
    published=VOGN.published,
)

KFAC: Final = Row(
    "kfac",
    paper=replace(
        KRONECKER,
        method="kfac",
        settings={**SHARED, "ema_rate": 0.9, "prior_precision": prior_precision(1e-4), "damping_form": "pi"},
    ),
    cpu=replace(CPU, method="kfac"),
    published=PUBLISHED["kfac"],
)

NOISY_KFAC: Final = Row(
    "noisy-kfac",
    paper=replace(
        KRONECKER, method="noisy_kfac", settings={**VARIATIONAL, "ema_rate": 0.9, "damping_form": "pi"}
    ),
    cpu=replace(CPU, method="noisy_kfac"),
    published=PUBLISHED["noisy-kfac"],
)

SHRUNK: Final = (
    "CPU size is another problem: Imagenette's ten classes, 1,200 images, ResNet-18 of width 16, batches of 32, "
    "10 epochs; OGN, VOGN, K-FAC and Noisy K-FAC have nothing set. It shows that the methods run side by side, and "
    "none of its numbers can be held against the paper's."
)

RECIPES: Final = (
    Recipe(
        "table1-imagenet",
        title="All methods on ImageNet",
        source="Table 1: ResNet-18 on ImageNet; sd in Table 3, curves in Figure 7e",
        rows=(SGD, ADAM, MC_DROPOUT, OGN, VOGN, VOGN_RELEASED, KFAC, NOISY_KFAC),
        figures=("training_curves", "calibration_curves", "reliability"),
        note=(
            "Paper: accuracy and NLL are the median of the last five epochs. Table 4 gives VOGN β₂ = 0.999, the "
            "released code 0.9 (vogn-released). OGN and K-FAC have no damping in the tables; VOGN's is used. "
            f"Their L2 coefficient times ρN is δ. {SHRUNK}"
        ),
    ),
    Recipe(
        "figure1",
        title="VOGN, Adam and SGD",
        source="Figure 1: ResNet-18 on ImageNet",
        rows=(VOGN, ADAM, SGD),
        figures=("training_curves", "calibration_curves"),
        note=SHRUNK,
    ),
)
