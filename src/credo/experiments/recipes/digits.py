"""The demonstration: handwritten digits, 8 and 9 unfamiliar. No table of the paper, but its claim in a minute."""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training

BASE: Final = Training(
    "adam",
    "mlp",
    "digits",
    epochs=30,
    batch_size=32,
    samples=30,
    held_out_classes=(8, 9),
)

RECIPES: Final = (
    Recipe(
        "digits",
        title="Handwritten digits, 8 and 9 unfamiliar",
        source="credo's own demonstration",
        rows=(
            Row("adam", paper=None, cpu=replace(BASE, settings={"lr": 1e-3})),
            Row(
                "mc-dropout",
                paper=None,
                cpu=replace(
                    BASE,
                    method="mc_dropout",
                    settings={"lr": 3e-2, "momentum": 0.9, "weight_decay": 1e-4},
                    model_options={"dropout": 0.1},
                ),
            ),
            Row("vogn", paper=None, cpu=replace(BASE, method="vogn")),
        ),
        figures=(
            "overview",
            "training_curves",
            "calibration_curves",
            "entropy_histograms",
            "uncertain_inputs",
        ),
        note="scikit-learn's 8×8 digits, an MLP; the digits 8 and 9 are kept out of training and test and shown afterwards.",
    ),
)
