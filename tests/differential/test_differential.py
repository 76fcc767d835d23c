"""Programs of fixed seeds: right, or refused by credo's own error; and most of those that are right are taken."""

import warnings

import pytest

from tests.differential.check import METHODS, run
from tests.differential.program import draw

PROGRAMS, PARTS = 5000, 10
EVERY = 4  # so many programs, also the steps of an optimiser


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_are_right_or_refused(part):
    taken = right = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(part, PROGRAMS, PARTS):
            program = draw(seed)
            taken += run(program, seed % EVERY == 0) == "right"
            right += program.right
    assert taken > 0.97 * right, f"{right - taken} of {right} programs that are right were refused"


def test_the_programs_have_what_is_to_be_found():
    """A table without an entry would find nothing."""
    programs = [draw(seed) for seed in range(300)]
    names = {name for program in programs for name in program.names}
    assert len(names) > 80
    assert sum(not program.right for program in programs) > 60
    assert {program.reduction for program in programs} == {"mean", "sum"}
    assert len(METHODS) == 6
