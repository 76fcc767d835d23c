"""Searching the few numbers that matter for a method, with optuna, on validation data.

    found = credo.tune(build_model, (x, y), method="vogn", validation_fraction=0.2, trials=20)
    credo tune digits --row vogn --trials 20

doors ── spaces: what is searched, a row for each method
      ── sources: training batches and validation data
      ── study: the loop over trials, stored as it goes; each is trained by `trials`
      ── outcome, files, page: the best, the lines to paste, a recipe, the plots
"""

from credo.experiments.tuning.doors import tune, tune_row
from credo.experiments.tuning.outcome import TrialRecord, Tuned
from credo.experiments.tuning.spaces import SPACES

__all__ = ["SPACES", "TrialRecord", "Tuned", "tune", "tune_row"]
