"""Searches of a second: what the tests of tuning share, and a search that is killed again and again.

python -m tests.experiments.tuned FOLDER: a search in peace and one that is killed, in children of one process.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.experiments.tuning import Tuned, tune
from credo.experiments.tuning.study import storage_at
from tests.experiments.small import blobs

TRAIN, VALIDATION = blobs(90, 0), blobs(60, 1)
LIMIT = 100  # seconds, for a child that hangs
KILLS = (0.3, 1, 8, 25)  # after so many seconds, or so many forward passes
SIGNS: dict[str, Any] = {"pipe": None, "pause": 0.0}


class Signalling(nn.Module):
    """Says on a pipe that it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        if SIGNS["pipe"] is not None:
            os.write(SIGNS["pipe"], b".")
            time.sleep(SIGNS["pause"])
        found: Tensor = self.layers(x)
        return found


def signalling() -> nn.Module:
    return Signalling()


def quick(out: Path, **changes: Any) -> Tuned:
    """Five trials, three epochs each, of VOGN on three blobs."""
    given: dict[str, Any] = {
        "method": "vogn",
        "validation": VALIDATION,
        "trials": 5,
        "epochs": 3,
        "batch_size": 32,
        "samples": 2,
        "progress": False,
    }
    model = changes.pop("model", signalling)
    data = changes.pop("data", TRAIN)
    return tune(model, data, out=out, **{**given, **changes})


def trials_of(found: Tuned) -> list[Any]:
    """Everything that must not depend on how often a search was killed."""
    return [(t.number, t.state, repr(t.nll), t.settings, repr(t.scores), t.epochs) for t in found.trials]


def search(out: Path) -> Tuned:
    return quick(out, trials=10)  # more than the sampler's random ones


def forked(out: Path) -> tuple[int, int]:
    """A child that searches, and the end of a pipe on which it says how far it is."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        signal.alarm(LIMIT)
        os.close(reading)
        SIGNS.update(pipe=writing, pause=0.005)
        search(out)
        os._exit(0)
    except BaseException as error:
        print(f"child: {error!r}", flush=True)
        os._exit(1)


def main(folder: Path) -> None:
    signal.alarm(LIMIT)
    storage_at(folder / "other.db")  # imports once for all children what is imported when first needed
    moments = random.Random(0)
    for moment in KILLS:
        pid, reading = forked(folder / "war")
        if isinstance(moment, float):
            time.sleep(moment)
        else:
            for _ in range(moment):
                assert os.read(reading, 1), "the child ended before it could be killed"
            time.sleep(moments.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(reading)
        assert code == -signal.SIGKILL, f"ended with {code} before it could be killed"
    print("killed", len(KILLS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
