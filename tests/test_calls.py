"""How many of credo's Python functions one step calls, and in how many files: counted, not timed.

Calls cost a small network's step more than its arithmetic does. The budgets are what is needed today and little more;
who needs less lowers them.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.curvature.torch_private import COMPILER

ROOT = str(Path(credo.__file__).parent) + "/"
STEP = 5  # factors of K-FAC are not refreshed at it


IN_OPTIM = 12  # changes of file among the calls of `optim`, in a step of VOGN


class Budget(NamedTuple):
    """At most so many."""

    calls: int
    files: int
    switches: int  # of files, from one call to the next


BUDGETS = {
    "VOGN": Budget(196, 14, 44),
    "OGN": Budget(186, 13, 44),
    "IVON": Budget(317, 14, 115),
    "KFAC": Budget(656, 19, 245),
    "NoisyKFAC": Budget(778, 20, 287),
    "BayesByBackprop": Budget(313, 17, 113),
}


def files_of_one_step(method: str) -> list[str]:
    """The file of each call of credo's, in order."""
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    optimizer = getattr(credo, method)(model, data_size=500)
    x, y = torch.randn(32, 20), torch.randint(0, 3, (32,))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEP - 1):
        optimizer.step(closure)
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(frame.f_code.co_filename.removeprefix(ROOT))

    # Where another test has loaded these, a step asks them something.
    loaded = {name: sys.modules.pop(name) for name in ("accelerate.state", COMPILER) if name in sys.modules}
    sys.setprofile(note)
    try:
        optimizer.step(closure)
    finally:
        sys.setprofile(None)
        sys.modules.update(loaded)
    return found


def counted(files: list[str]) -> Budget:
    switches = sum(one != other for one, other in pairwise(files))
    return Budget(len(files), len(set(files)), switches)


@pytest.mark.skipif(not credo.kernels.status().enabled, reason="the budgets are those of the kernels")
@pytest.mark.parametrize("method", BUDGETS)
def test_a_step_keeps_to_its_budget(method: str) -> None:
    found = counted(files_of_one_step(method))
    assert all(own <= most for own, most in zip(found, BUDGETS[method], strict=True)), found


@pytest.mark.skipif(not credo.kernels.status().enabled, reason="the budgets are those of the kernels")
def test_a_step_of_vogn_goes_straight_down() -> None:
    """Between the method, the blocks and the sums: a reader follows it by turning so many pages."""
    found = [name for name in files_of_one_step("VOGN") if name.startswith("optim/")]
    assert counted(found).switches <= IN_OPTIM


def test_the_count_is_the_same_at_every_run() -> None:
    assert files_of_one_step("VOGN") == files_of_one_step("VOGN")
