"""One run of a queue, in a process of its own: `python -m credo.cli.worker FACTS`, started by `credo queue`.

The queue holds the other end of this process's standard input. A "p" pauses the run between two steps, a "c" lets it
go on. The end of the input means that the queue is gone, however it went; the run is then saved and the process ends,
as after SIGTERM. So no run is left without a queue that watches it, not even a paused one.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from credo.cli import plain_warnings
from credo.cli.exits import OK, exit_code, message_of, terminable
from credo.experiments.checkpoint import is_finished
from credo.experiments.ensembles import ensemble_of
from credo.experiments.queue_file import Job, job_of
from credo.experiments.queue_state import ProgressFile
from credo.experiments.records import write_record
from credo.experiments.run_folder import RunFolder
from credo.experiments.train import train

AUTOGROUP = Path("/proc/self/autogroup")


class Orders:
    """What the queue says through the pipe; read by a thread, since the run is busy."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._go.set()

    def listen(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> float:
        """Returns when the run may go on; the seconds that it had to wait."""
        if self._go.is_set():
            return 0.0
        start = time.monotonic()
        self._go.wait()
        return time.monotonic() - start

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while order := os.read(0, 1):
                (self._go.clear if order == b"p" else self._go.set)()
        os.kill(os.getpid(), signal.SIGTERM)  # first, or a step more would be taken
        self._go.set()


def leave_to_others(nice: int) -> None:
    """Lowers the priority of this process. Where Linux shares the processor between sessions first (autogroups), a
    process's own nice value counts inside its session only; this process leads one, so the session is lowered, too."""
    with contextlib.suppress(OSError, AttributeError):  # Windows has no nice
        os.nice(nice)
        if os.getsid(0) == os.getpid():
            AUTOGROUP.write_text(str(nice))


def main(facts: dict[str, Any]) -> int:
    """`facts`: the run, the folders, and how much of the machine to take."""
    leave_to_others(int(facts["nice"]))
    torch.set_num_threads(int(facts["threads"]))
    try:
        with terminable(), plain_warnings():
            orders = Orders()
            orders.listen()
            work(job_of(facts["job"]), facts, orders)
        return OK
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"credo: {message_of(error) or type(error).__name__}", file=sys.stderr)
        return code


def work(job: Job, facts: dict[str, Any], orders: Orders) -> None:
    """Train to the end, then leave the record. Other settings than the folder's are an error."""
    folder = job.folder(facts["out"])
    place = RunFolder(folder)
    if job.ensemble:
        members, data, device = job.members(facts["out"]), facts["data"], facts["device"]
        ensemble_of(job.training, members, folder, data_root=data, name=job.name, device=device)
    elif not is_finished(place, job.training, job.seed):
        if place.config.exists() and place.checkpoints.is_dir():
            place.compare(job.training, job.seed, strictly=True)
        train(
            job.training,
            job.seed,
            folder,
            resume="fallback",
            data_root=facts["data"],
            watcher=ProgressFile(folder, orders.wait),
            name=job.name,
            device=facts["device"],
        )
    if facts["results"] is not None:
        write_record(folder, job.record(Path(facts["results"])))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
