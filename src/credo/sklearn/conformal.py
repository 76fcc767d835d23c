"""Split-conformal prediction: intervals and sets with a guarantee that holds for any model and any data.

Scores of n examples that were not trained on; the k-th smallest is the threshold, k = ⌈(n + 1)·coverage⌉. A new
example from the same distribution has a score at most that with probability k/(n + 1), between coverage and
coverage + 1/(n + 1). The guarantee is an average over examples and over calibration sets, not one for each input.

    regression       score |y − μ(x)|/σ(x), interval μ ± threshold·σ
    classification   score 1 − p̂(y|x), set {y: 1 − p̂(y|x) ≤ threshold}, with the most probable class always in it
"""

import math

import numpy
from numpy.typing import NDArray

from credo.errors import InvalidValue

Array = NDArray[numpy.float64]


def threshold(scores: Array, coverage: float) -> float:
    """The score that a new example exceeds with probability at most 1 − coverage."""
    n = len(scores)
    k = math.ceil((n + 1) * coverage - 1e-9)
    if k > n:
        raise InvalidValue(
            f"coverage={coverage} needs at least {smallest_set(coverage)} calibration examples, and there are {n}. "
            "Raise calibration_fraction, or lower coverage"
        )
    return float(numpy.sort(scores)[k - 1])


def smallest_set(coverage: float) -> int:
    """How many calibration examples a coverage needs at least."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def value_scores(mean: Array, variance: Array, targets: Array) -> Array:
    return numpy.abs(targets - mean) / numpy.sqrt(variance)


def class_scores(probs: Array, classes: NDArray[numpy.intp]) -> Array:
    """`classes` are the columns of the true classes."""
    return 1 - probs[numpy.arange(len(probs)), classes]


def class_sets(probs: Array, limit: float) -> NDArray[numpy.bool_]:
    """(M, C): which classes are in the set of each example."""
    sets = 1 - probs <= limit
    sets[numpy.arange(len(probs)), probs.argmax(1)] = True
    return sets
