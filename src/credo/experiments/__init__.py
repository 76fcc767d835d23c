"""Experiments: recipes as data, one training loop, runs that survive crashes, and reports.

A recipe of one's own, for one's own module and data:

    from credo.experiments import Recipe, Row, Training
    from credo.experiments.run import run

    def training(method, **settings):
        return Training(method, make_model, make_splits, settings, epochs=20, batch_size=64)

    rows = (Row("adam", None, training("adam", lr=1e-3)), Row("vogn", None, training("vogn", lr=2e-3)))
    results = run(Recipe("mine", "My data", "mine", rows), seeds=3, out="runs")
"""

from credo.experiments.recipe import Recipe, Row, TaskStream, Training

__all__ = ["Recipe", "Row", "TaskStream", "Training"]
