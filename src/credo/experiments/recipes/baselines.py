"""Comparisons that are not the paper's: VOGN beside what a user would take instead, and beside published numbers."""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from credo.experiments.recipe import Published, Recipe, Row, Setting, Training


def published(accuracy: float, sd: float | None, nll: float, ece: float) -> Published:
    return MappingProxyType({"accuracy": (accuracy, sd), "nll": (nll, None), "ece": (ece, None)})


def row(
    sizes: tuple[Training | None, Training],
    name: str,
    settings: dict[str, Setting],
    dropout: float = 0.0,
    known: Published | None = None,
) -> Row:
    """The method that the row is named after, at the paper's size, if there is one, and at CPU size."""
    method = name.partition("-")[0] if name.startswith("laplace") else name.replace("-", "_")
    more: dict[str, Setting] = {"dropout": dropout} if dropout else {}
    paper, cpu = (
        size
        and replace(
            size,
            method=method,
            settings={**size.settings, **settings},
            model_options={**size.model_options, **more},
        )
        for size in sizes
    )
    return Row(name, paper, cpu, published=known or MappingProxyType({}))


def swag_row(sizes: tuple[Training, Training], settings: dict[str, Setting]) -> Row:
    """SWAG: SGD as in its row for three quarters of the epochs, then a constant half of the rate while it collects."""
    paper, cpu = (
        replace(
            size,
            method="swag",
            settings={**settings, "collect_from": size.epochs * 3 // 4 + 1},
            cosine=False,
            milestones=(size.epochs * 3 // 4,),
            decay=0.5,
        )
        for size in sizes
    )
    return Row("swag", paper, cpu)


# Fashion-MNIST, LeNet-5, 100 epochs

FASHION: Final = Training(
    "adamw",
    "lenet5",
    "fashion_mnist",
    epochs=100,
    batch_size=128,
    validation_size=6_000,
    warmup_epochs=5,
    cosine=True,
    samples=64,
    epoch_samples=8,
    epoch_test_size=2_000,
    ood=("notmnist",),
)
FASHION_SIZES: Final = (
    FASHION,
    replace(FASHION, epochs=10, warmup_epochs=1, train_size=10_000, test_size=5_000, samples=16),
)


FASHION_LENET5: Final = (
    Recipe(
        "fashion-lenet5",
        title="LeNet-5 on Fashion-MNIST, all baselines",
        source="credo's own comparison",
        rows=(
            row(FASHION_SIZES, "sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
            row(FASHION_SIZES, "adam", {"lr": 1e-3, "weight_decay": 1e-4}),
            row(
                FASHION_SIZES,
                "adamw",
                {"lr": 1e-3, "weight_decay": 1e-2},
                known=published(0.896, 0.003, 0.296, 0.022),
            ),
            row(
                FASHION_SIZES, "mc-dropout", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}, dropout=0.1
            ),
            swag_row(FASHION_SIZES, {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
            row(FASHION_SIZES, "laplace", {"lr": 1e-3, "weight_decay": 1e-2}),
            row(
                FASHION_SIZES,
                "laplace-kronecker",
                {"lr": 1e-3, "weight_decay": 1e-2, "structure": "kronecker"},
            ),
            row(
                FASHION_SIZES, "laplace-diagonal", {"lr": 1e-3, "weight_decay": 1e-2, "structure": "diagonal"}
            ),
            row(FASHION_SIZES, "ivon", {"lr": 0.2}, known=published(0.910, 0.002, 0.258, 0.019)),
            row(FASHION_SIZES, "vogn", {}),
        ),
        figures=("training_curves", "calibration_curves", "reliability", "entropy_histograms"),
        note=(
            "54,000 training, 6,000 validation and 10,000 test images, no augmentation; five epochs of warm-up, then a "
            "cosine. Published: AdamW and IVON of other authors, ECE over 15 bins there and 20 here. VOGN has nothing "
            "set. The Laplace rows have AdamW's weights, and a prior precision chosen by the validation images. "
            "CPU size: 10,000 training and 5,000 test images, 10 epochs, 16 samples instead of 64."
        ),
    ),
)


# ResNet-20 on a tenth of CIFAR-10, 200 epochs: few data, where point estimates are over-confident

TENTH: Final = Training(
    "sgd",
    "resnet20",
    "cifar10",
    epochs=200,
    batch_size=50,
    augment=True,
    train_size=5_000,
    validation_size=1_000,
    warmup_epochs=5,
    cosine=True,
    samples=32,
    epoch_samples=2,
    epoch_test_size=1_000,
    ood=("svhn",),
)
TENTH_SIZES: Final = (
    TENTH,
    replace(TENTH, epochs=10, warmup_epochs=1, test_size=2_000, model_options={"width": 8}, samples=8),
)


TENTH_RESNET20: Final = (
    Recipe(
        "cifar10-tenth-resnet20",
        title="ResNet-20 on 5,000 images of CIFAR-10, all baselines",
        source="credo's own comparison",
        rows=(
            row(
                TENTH_SIZES,
                "sgd",
                {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
                known=published(0.760, None, 0.942, 0.132),
            ),
            row(TENTH_SIZES, "adam", {"lr": 1e-3, "weight_decay": 1e-4}),
            row(
                TENTH_SIZES,
                "adamw",
                {"lr": 1e-3, "weight_decay": 1e-2},
                known=published(0.665, None, 2.374, 0.261),
            ),
            row(TENTH_SIZES, "mc-dropout", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}, dropout=0.1),
            swag_row(TENTH_SIZES, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
            row(TENTH_SIZES, "laplace", {"lr": 1e-3, "weight_decay": 1e-2}),
            row(TENTH_SIZES, "ivon", {"lr": 0.2}, known=published(0.760, None, 0.924, 0.130)),
            row(TENTH_SIZES, "vogn", {}),
        ),
        figures=("training_curves", "calibration_curves", "reliability", "entropy_histograms"),
        note=(
            "5,000 training images and 1,000 others for validation, augmentation, batches of 50, five epochs of "
            "warm-up, then a cosine; BatchNorm. Published: other authors' networks of this size on a tenth of "
            "CIFAR-10; IVON's is at the mean. VOGN has nothing set. Laplace has AdamW's weights. "
            "CPU size: half the width, 10 epochs, 2,000 test images, 8 samples instead of 32."
        ),
    ),
)


# UCI regression, one hidden layer of 50 units; the data set and the split are chosen with --set data=uci:yacht:3

UCI_BASE: Final = Training(
    "adam",
    "mlp",
    "uci:yacht",
    settings={"noise_variance": 0.1},
    model_options={"width": 50, "layers": 1},
    epochs=200,
    batch_size=32,
    validation_size=40,
    warmup_epochs=5,
    cosine=True,
    samples=100,
    epoch_samples=4,
    task="regression",
)
UCI: Final = (
    Recipe(
        "uci",
        title="UCI regression, one hidden layer of 50",
        source="not in the paper",
        rows=(
            row((None, UCI_BASE), "adam", {"lr": 1e-2, "weight_decay": 1e-4}),
            row((None, UCI_BASE), "mc-dropout", {"lr": 1e-3, "weight_decay": 1e-4}, dropout=0.05),
            row((None, UCI_BASE), "laplace", {"lr": 1e-2, "structure": "kronecker"}),
            row((None, UCI_BASE), "ivon", {"lr": 1e-2}),
            row((None, UCI_BASE), "vogn", {}),
        ),
        note=(
            "The standard splits of Hernández-Lobato and Adams, 40 examples of each training half kept for validation. "
            "Trained with an observation variance of 0.1 in standard units; records also have the scores with the "
            "variance that fits the validation examples, in the units of the data."
        ),
    ),
)


# Every method there is, side by side on one small problem. Each has the defaults of its class, or a setting that trains
# in so few epochs; none was tuned against the others.

METHODS_LENET5: Final = Training("adam", "lenet5", "cifar10", epochs=10, batch_size=128, milestones=(8,))
METHODS_DIGITS: Final = Training(
    "adam", "mlp", "digits", epochs=40, batch_size=32, milestones=(30,), held_out_classes=(8, 9)
)


def method_rows(base: Training) -> tuple[Row, ...]:
    return (
        row((None, base), "sgd", {"lr": 1e-2}),
        row((None, base), "adam", {"lr": 1e-3}),
        row((None, base), "mc-dropout", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}, dropout=0.1),
        row((None, base), "bbb", {"lr": 1e-3, "initial_log_variance": -9.0}),
        row((None, base), "ivon", {}),
        row((None, base), "kfac", {}),
        row((None, base), "noisy-kfac", {}),
        row((None, base), "ogn", {}),
        row((None, base), "vogn", {}),
    )


EVERY_METHOD: Final = (
    Recipe(
        "methods-lenet5",
        title="Every method: LeNet-5 on CIFAR-10",
        source="credo's own comparison",
        rows=method_rows(METHODS_LENET5),
        figures=("training_curves", "calibration_curves", "reliability"),
        note="Ten epochs with defaults: a check that every method trains, no ranking of methods.",
    ),
    Recipe(
        "methods-digits",
        title="Every method: handwritten digits, 8 and 9 unfamiliar",
        source="credo's own comparison",
        rows=method_rows(METHODS_DIGITS),
        figures=("training_curves", "calibration_curves", "entropy_histograms"),
        note="Forty epochs on all training images with defaults: a check that every method trains, no ranking.",
    ),
)


RECIPES: Final = (*FASHION_LENET5, *TENTH_RESNET20, *UCI, *EVERY_METHOD)
