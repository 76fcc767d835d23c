"""The demonstration: handwritten digits, 8 and 9 unfamiliar. No table of the paper, but its claim in a minute.

300 training images: with all 1,153 familiar ones every method is right on 99 % of the test images, and there is nothing
to compare. Network, data, epochs, batches and schedule are the same for all. What is left to choose for each method was
chosen among eight settings each, by NLL on validation images of other splits than the one shown
(benchmarks.digits_study; benchmarks/notebook/digits_demo.md).
"""

from dataclasses import replace
from typing import Final

from credo.experiments.recipe import Recipe, Row, Training

BASE: Final = Training(
    "adam",
    "mlp",
    "digits",
    epochs=100,
    batch_size=32,
    train_size=300,
    milestones=(60,),
    samples=30,
    held_out_classes=(8, 9),
)

RECIPES: Final = (
    Recipe(
        "digits",
        title="Handwritten digits, 8 and 9 unfamiliar",
        source="credo's own demonstration",
        rows=(
            Row("adam", paper=None, cpu=replace(BASE, settings={"lr": 3e-3, "weight_decay": 3e-3})),
            Row(
                "mc-dropout",
                paper=None,
                cpu=replace(
                    BASE,
                    method="mc_dropout",
                    settings={"lr": 3e-2, "momentum": 0.9, "weight_decay": 1e-3},
                    model_options={"dropout": 0.3},
                ),
            ),
            Row(
                "vogn",
                paper=None,
                cpu=replace(
                    BASE, method="vogn", settings={"lr": 5e-2, "damping": 0.5, "prior_precision": 0.3}
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
        note="scikit-learn's 8×8 digits, 300 of them for training; an MLP. 8 and 9 are kept out, and shown afterwards.",
    ),
)
