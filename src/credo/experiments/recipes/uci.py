"""UCI regression, one hidden layer of 50 units; the data set and the split are chosen with --set data=uci:yacht:3."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Setting, Training

BASE: Final = Training(
    "adam",
    "mlp",
    "uci:yacht",
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
NOISE: Final[dict[str, Setting]] = {"noise_variance": 0.1}


def row(name: str, method: str, settings: dict[str, Setting], dropout: float = 0.0) -> Row:
    options: dict[str, Setting] = {**BASE.model_options, **({"dropout": dropout} if dropout else {})}
    return Row(
        name, None, replace(BASE, method=method, settings={**NOISE, **settings}, model_options=options)
    )


RECIPES: Final = (
    Recipe(
        "uci",
        title="UCI regression, one hidden layer of 50",
        source="not in the paper",
        rows=(
            row("adam", "adam", {"lr": 1e-2, "weight_decay": 1e-4}),
            row("mc-dropout", "mc_dropout", {"lr": 1e-3, "weight_decay": 1e-4}, dropout=0.05),
            row("laplace", "laplace", {"lr": 1e-2, "structure": "kronecker"}),
            row("ivon", "ivon", {"lr": 1e-2}),
            row("vogn", "vogn", {}),
        ),
        note=(
            "The standard splits of Hernández-Lobato and Adams, 40 examples of each training half kept for validation. "
            "Trained with an observation variance of 0.1 in standard units; records also have the scores with the "
            "variance that fits the validation examples, in the units of the data."
        ),
    ),
)
