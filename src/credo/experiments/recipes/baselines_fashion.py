"""Fashion-MNIST, LeNet-5, 100 epochs: VOGN beside what a user would take instead, and beside published numbers."""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from credo.experiments.recipe import Published, Recipe, Row, Setting, Training

FULL: Final = Training(
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
CPU: Final = replace(FULL, epochs=10, warmup_epochs=1, train_size=10_000, test_size=5_000, samples=16)


def published(accuracy: tuple[float, float | None], nll: float, ece: float) -> Published:
    return MappingProxyType({"accuracy": accuracy, "nll": (nll, None), "ece": (ece, None)})


def row(name: str, settings: dict[str, Setting], dropout: float = 0.0, known: Published | None = None) -> Row:
    options: dict[str, Setting] = {"dropout": dropout} if dropout else {}
    method = name.partition("-")[0] if name.startswith("laplace") else name.replace("-", "_")
    sizes = [replace(size, method=method, settings=settings, model_options=options) for size in (FULL, CPU)]
    return Row(name, paper=sizes[0], cpu=sizes[1], published=known or MappingProxyType({}))


def averaged(name: str, *sizes: Training) -> Row:
    """SWAG: SGD as in its row for three quarters of the epochs, then a constant half of the rate while it collects."""
    changed = [
        replace(
            size,
            method="swag",
            settings={
                "lr": 0.05,
                "momentum": 0.9,
                "weight_decay": 5e-4,
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
        "fashion-lenet5",
        title="LeNet-5 on Fashion-MNIST, all baselines",
        source="credo's own comparison",
        rows=(
            row("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
            row("adam", {"lr": 1e-3, "weight_decay": 1e-4}),
            row("adamw", {"lr": 1e-3, "weight_decay": 1e-2}, known=published((0.896, 0.003), 0.296, 0.022)),
            row("mc-dropout", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}, dropout=0.1),
            averaged("swag", FULL, CPU),
            row("laplace", {"lr": 1e-3, "weight_decay": 1e-2}),
            row("laplace-kronecker", {"lr": 1e-3, "weight_decay": 1e-2, "structure": "kronecker"}),
            row("laplace-diagonal", {"lr": 1e-3, "weight_decay": 1e-2, "structure": "diagonal"}),
            row("ivon", {"lr": 0.2}, known=published((0.910, 0.002), 0.258, 0.019)),
            row("vogn", {}),
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
