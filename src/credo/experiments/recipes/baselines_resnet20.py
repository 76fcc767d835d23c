"""ResNet-20 on a tenth of CIFAR-10, 200 epochs: few data, where point estimates are over-confident."""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from credo.experiments.recipe import Published, Recipe, Row, Setting, Training

FULL: Final = Training(
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
CPU: Final = replace(FULL, epochs=10, warmup_epochs=1, test_size=2_000, model_options={"width": 8}, samples=8)


def published(accuracy: float, nll: float, ece: float) -> Published:
    return MappingProxyType({"accuracy": (accuracy, None), "nll": (nll, None), "ece": (ece, None)})


def row(name: str, settings: dict[str, Setting], dropout: float = 0.0, known: Published | None = None) -> Row:
    method = name.replace("-", "_")
    options: dict[str, Setting] = {"dropout": dropout} if dropout else {}
    sizes = [
        replace(size, method=method, settings=settings, model_options={**size.model_options, **options})
        for size in (FULL, CPU)
    ]
    return Row(name, paper=sizes[0], cpu=sizes[1], published=known or MappingProxyType({}))


def averaged(name: str, *sizes: Training) -> Row:
    """SWAG: SGD as in its row for three quarters of the epochs, then a constant half of the rate while it collects."""
    changed = [
        replace(
            size,
            method="swag",
            settings={
                "lr": 0.1,
                "momentum": 0.9,
                "weight_decay": 1e-3,
                "collect_from": size.epochs * 3 // 4 + 1,
            },
            cosine=False,
            milestones=(size.epochs * 3 // 4,),
            decay=0.5,
        )
        for size in sizes
    ]
    return Row(name, paper=changed[0], cpu=changed[1])


RECIPES: Final = (
    Recipe(
        "cifar10-tenth-resnet20",
        title="ResNet-20 on 5,000 images of CIFAR-10, all baselines",
        source="credo's own comparison",
        rows=(
            row(
                "sgd",
                {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
                known=published(0.760, 0.942, 0.132),
            ),
            row("adam", {"lr": 1e-3, "weight_decay": 1e-4}),
            row("adamw", {"lr": 1e-3, "weight_decay": 1e-2}, known=published(0.665, 2.374, 0.261)),
            row("mc-dropout", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}, dropout=0.1),
            averaged("swag", FULL, CPU),
            row("laplace", {"lr": 1e-3, "weight_decay": 1e-2}),
            row("ivon", {"lr": 0.2}, known=published(0.760, 0.924, 0.130)),
            row("vogn", {}),
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
