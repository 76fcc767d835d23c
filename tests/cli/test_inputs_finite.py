"""Inputs of `credo predict` that hold NaN or infinity are refused: every line would say class 0, probability nan."""

import numpy as np
import pytest

from credo.cli.predict import read_inputs
from credo.errors import InvalidValue


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_its_number(tmp_path, bad):
    images = np.zeros((4, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "good.npy", images)
    assert len(read_inputs(tmp_path / "good.npy", (1, 8, 8)).values) == 4
    images[2, 0, 3, 3] = bad
    np.save(tmp_path / "bad.npy", images)
    with pytest.raises(InvalidValue, match="not finite, first in example 2"):
        read_inputs(tmp_path / "bad.npy", (1, 8, 8))
