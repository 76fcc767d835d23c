"""Searching the few numbers that matter for a method, with optuna, on validation data.

    found = credo.tune(build_model, (x, y), method="vogn", validation_fraction=0.2, trials=20)
    credo tune digits --row vogn --trials 20

search ── spaces: what is searched, a row for each method
       ── study: the loop over trials, stored as it goes
       ── trials: a trial, its training batches and validation data
       ── outcome: the best, the lines to paste, a recipe, the page of plots
"""

from credo.experiments.tuning.outcome import TrialRecord, Tuned
from credo.experiments.tuning.search import tune, tune_row
from credo.experiments.tuning.spaces import SPACES

__all__ = ["SPACES", "TrialRecord", "Tuned", "tune", "tune_row"]
