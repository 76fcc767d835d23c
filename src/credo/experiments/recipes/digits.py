"""The demonstration: handwritten digits, 8 and 9 unfamiliar. No table of the paper, but its claim in a minute.

Same network, data, epochs, batches and schedule for all; one prior, N(0, 1/δ) with δ = 1, which for Adam and SGD is a
weight decay of δ/N ≈ 1e-3. What is left to choose for each method was chosen by its NLL on a third of the training data,
kept apart for that (docs/log.md has the grid); the test data were not looked at.
"""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training

BASE: Final = Training(
    "adam",
    "mlp",
    "digits",
    epochs=60,
    batch_size=32,
    milestones=(36,),
    samples=30,
    held_out_classes=(8, 9),
)

RECIPES: Final = (
    Recipe(
        "digits",
        title="Handwritten digits, 8 and 9 unfamiliar",
        source="credo's own demonstration",
        rows=(
            Row("adam", paper=None, cpu=replace(BASE, settings={"lr": 3e-3, "weight_decay": 1e-3})),
            Row(
                "mc-dropout",
                paper=None,
                cpu=replace(
                    BASE,
                    method="mc_dropout",
                    settings={"lr": 3e-2, "momentum": 0.9, "weight_decay": 1e-3},
                    model_options={"dropout": 0.1},
                ),
            ),
            Row(
                "vogn",
                paper=None,
                cpu=replace(
                    BASE, method="vogn", settings={"lr": 5e-2, "damping": 1.0, "prior_precision": 1.0}
                ),
            ),
        ),
        figures=(
            "overview",
            "training_curves",
            "calibration_curves",
            "entropy_histograms",
            "uncertain_inputs",
        ),
        note="scikit-learn's 8×8 digits, an MLP; 8 and 9 are kept out of training and test, and shown afterwards.",
    ),
)
