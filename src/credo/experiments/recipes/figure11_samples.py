"""Figure 11: weight samples in training (K on each of 128 GPUs) and at test time (C), VOGN on ImageNet."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import table1_imagenet as imagenet

PAPER: Final = replace(
    imagenet.PAPER,
    method="vogn",
    settings={**imagenet.VARIATIONAL, **imagenet.SLICES, "ema_rate": 0.999},
    warmup_from=1.25e-5,
)
CPU: Final = Training(
    "vogn",
    "lenet5",
    "cifar10",
    settings={"lr": 1.5e-3, "damping": 3e-2, "prior_precision": 1.0},
    epochs=10,
    batch_size=128,
    train_size=10_000,
    test_size=5_000,
)


def with_samples(training: Training, train: int, test: int) -> Training:
    return replace(training, settings={**training.settings, "mc_samples": train}, samples=test)


def row(train: int, test: int) -> Row:
    return Row(
        f"train-{train}-test-{test}",
        paper=with_samples(PAPER, train, test),
        cpu=with_samples(CPU, train, test),
    )


RECIPES: Final = (
    Recipe(
        "figure11-training-samples",
        title="VOGN and the number of training samples",
        source="Figure 11, top: ResNet-18 on ImageNet",
        rows=(row(1, 10), row(2, 10), row(3, 10)),
        figures=("sensitivity", "training_curves"),
        note=(
            "Paper: mc = 128×1, 128×2 and 128×3, curves only; two samples should be better than one at about 1.5 times "
            "the time, three hardly better than two. CPU size is another problem: LeNet-5 on 10,000 images of "
            "CIFAR-10, 5,000 test images, 10 epochs, K samples on the whole batch."
        ),
    ),
    Recipe(
        "figure11-test-samples",
        title="VOGN and the number of test samples",
        source="Figure 11, bottom: ResNet-18 on ImageNet",
        rows=(row(1, 1), row(1, 10), row(1, 100)),
        figures=("sensitivity",),
        note=(
            "Paper: val_mc = 10 and 100 on the same trained model, curves only; 1 is ours. The same seed gives the "
            "same trained model in each row. CPU size: as figure11-training-samples."
        ),
    ),
)
