"""`credo queue` with forked processes: the real scheduler and the real workers, without the seconds that imports take.

python -m tests.cli.queueing kill FOLDER KILLS   with scheduler and workers killed at random moments
python -m tests.cli.queueing run FOLDER [ROW]    once; the disk is full for the workers of that row
"""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import sklearn.datasets  # noqa: F401  (the data of these runs; imported once, before the first fork)
import torch

import credo.experiments.train as training
from credo.cli import main, queue, worker
from credo.experiments.checkpoint import Checkpointing
from credo.experiments.lock import living_holder
from credo.posterior import files

LIST = """
[[runs]]
recipe = "small.toml"
rows = ["adam", "vogn"]
seeds = [0, 1, 2]
"""
RECIPE = """
name = "small"
[training]
model = "mlp"
data = "digits"
epochs = 5
batch_size = 64
train_size = 320
test_size = 100
validation_size = 100
held_out_classes = [8, 9]
samples = 3
model_options = { width = 8 }
[[rows]]
name = "adam"
method = "adam"
[[rows]]
name = "vogn"
method = "vogn"
"""


class Forked:
    """What `subprocess.Popen` is to the queue, for a child that is already imported."""

    def __init__(self, facts: str, log: IO[bytes], threads: int) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.dup2(reading, 0)
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            os.closerange(3, 64)  # the other workers' pipes among them, as Popen does
            os._exit(child(facts))
        os.close(reading)
        self.stdin = open(writing, "wb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.005)
        return self._code or 0

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def child(facts: str) -> int:
    import json

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    found: dict[str, Any] = json.loads(facts)
    if found["job"]["row"] == FULL:
        files._write_durably = no_space
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        return worker.main(found)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        return 99


FULL = ""


def no_space(path: Path, data: bytes) -> None:
    path.write_bytes(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def prepare(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(RECIPE)
    (folder / "queue.toml").write_text(LIST)
    out, results = str(folder / "runs"), str(folder / "results")
    return [
        "queue",
        str(folder / "queue.toml"),
        "--jobs",
        "2",
        "--nice",
        "0",
        "--out",
        out,
        "--results",
        results,
    ]


def forked_queue(words: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os._exit(main(words))


def kill_at_random(folder: Path, kills: int) -> None:
    """The scheduler, a worker, or all of them."""
    words, moments, killed = prepare(folder), random.Random(0), 0
    while killed < kills:
        pid = forked_queue(words)
        try:
            while killed < kills:
                time.sleep(moments.uniform(0.05, 0.5))
                workers = at_work(folder)
                what = moments.choice(["scheduler", "worker", "all"])
                chosen = [*(workers if what == "all" else workers[:1] if what == "worker" else [])]
                for number in chosen:
                    os.kill(number, signal.SIGKILL)
                killed += 1 if chosen or what != "worker" else 0
                if what != "worker":
                    break
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    kill_while_paused(folder, words)
    done = len(list(folder.rglob("result.json")))
    assert done < 6, "all runs ended before they could be killed; make them longer"
    print(f"killed {killed} times, {done} of 6 runs finished by then", flush=True)
    assert os.waitstatus_to_exitcode(os.waitpid(forked_queue(words), 0)[1]) == 0


def at_work(folder: Path) -> list[int]:
    return [pid for lock in folder.rglob("seed-*/lock") if (pid := living_holder(lock))]


def kill_while_paused(folder: Path, words: list[str]) -> None:
    """Workers that wait for a word of the queue notice that it will never come, save, and end."""
    wait_until(lambda: not at_work(folder))  # those of the queue before
    pid = forked_queue(words)
    wait_until(lambda: len(at_work(folder)) > 0)
    os.kill(pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not at_work(folder))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # what a process has written outlives it; only a power cut would need the disk
    queue.start = Forked  # type: ignore[assignment]
    queue.AGAIN, queue.LOOK, queue.DEATHS = 0.2, 0.02, 100  # type: ignore[misc]
    training.Checkpointing = lambda: Checkpointing(steps=3)  # type: ignore[assignment,misc]
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "run":
        FULL = sys.argv[3] if len(sys.argv) > 3 else ""
        sys.exit(main(prepare(folder)))
    waiting = worker.Orders.wait
    worker.Orders.wait = lambda self: time.sleep(0.1) or waiting(self)  # type: ignore[func-returns-value,method-assign]
    kill_at_random(folder, int(sys.argv[3]))
