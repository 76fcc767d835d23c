"""Trains the same run twice, in children that a parent forks: once in peace, once killed again and again.

python -m tests.experiments.killing FOLDER KILLS METHOD...: a process of its own, so that torch is imported once for
all children and forked before it has any threads.
"""

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from credo.experiments.checkpoint import Checkpointing
from credo.experiments.train import train
from credo.experiments.watchers import Watcher
from tests.experiments.small import TRAININGS


class Slow(Watcher):
    """Long enough that a run of 80 steps cannot end between the kills."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def stepped(self, step: int) -> None:
        time.sleep(self._pause)


def forked(folder: Path, method: str, checkpointing: Checkpointing, pause: float = 0.0) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        training = replace(TRAININGS[method], epochs=20, milestones=(8, 16), tempering_epochs=10.0)
        train(training, 7, folder, checkpointing=checkpointing, watcher=Slow(pause))
        os._exit(0)
    except BaseException as error:
        print(f"child: {error!r}", flush=True)
        os._exit(1)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, method: str, kills: int) -> None:
    assert ended(forked(folder / "peace", method, Checkpointing(seconds=None))) == 0
    moments, killed = random.Random(method), 0
    while killed < kills:
        pid = forked(folder / "war", method, Checkpointing(steps=1), pause=0.04)
        time.sleep(moments.uniform(0.05, 0.25))
        os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert code == -signal.SIGKILL, f"ended with {code} before it could be killed {kills} times"
        killed += 1
    assert ended(forked(folder / "war", method, Checkpointing())) == 0
    print("killed", killed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # what a process has written outlives it; only a power cut would need the disk
    for method in sys.argv[3:]:
        main(Path(sys.argv[1]) / method, method, int(sys.argv[2]))
