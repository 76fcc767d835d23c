"""More ranks, less noise: the average over R of them has 1/R of the variance. Ranks simulated in one process."""

import pytest

from benchmarks.mc_parallel import one_minibatch, own_minibatch, relative_variance, simulate


@pytest.mark.parametrize("data", [one_minibatch, own_minibatch], ids=["MC-parallel", "data-parallel"])
def test_the_variance_of_gradients_and_squares_falls_with_the_ranks(data):
    """Streams that were one and the same would give 16, correlated ones something between."""
    for estimate in simulate(data, ranks=16, steps=120):
        assert relative_variance(estimate, 16) == pytest.approx(1, abs=0.35)  # five standard errors
