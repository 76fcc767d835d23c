"""A worker as the queue sees it: a process with a pipe to it, and a file that keeps what it says."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from credo.experiments.queue_file import Job
from credo.experiments.queue_state import WORKER_LOG

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Options:
    """What all runs of a queue share."""

    out: Path
    results: Path | None
    data: Path | None
    threads: int
    nice: int
    device: str


def start(facts: str, log: IO[bytes], threads: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "credo.cli.worker", facts],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        bufsize=0,
        env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
        start_new_session=True,  # Ctrl-C and Ctrl-Z are the queue's, which passes on what is meant
    )


class Worker:
    def __init__(self, job: Job, options: Options) -> None:
        """OSError if the folder, the log or the process cannot be made."""
        self.job = job
        folder = job.folder(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "job": job.facts(),
            "out": str(options.out),
            "results": None if options.results is None else str(options.results),
            "data": None if options.data is None else str(options.data),
            "threads": options.threads,
            "nice": options.nice,
            "device": options.device,
        }
        self._log = folder / WORKER_LOG
        with open(self._log, "ab") as log:
            self._said_before = log.tell()
            self._process = start(json.dumps(facts), log, options.threads)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        """Below 0: minus the signal that ended it."""
        return self._process.wait()

    def last_words(self) -> str:
        """The last line that this worker has said, without warnings; nothing if there is none."""
        try:
            said = self._log.read_bytes()[self._said_before :]
        except OSError:
            return ""
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if not line.startswith("credo: warning:")]
        return told[-1].removeprefix("credo: ") if told else ""

    def pause(self) -> None:
        self._tell(b"p")

    def go_on(self) -> None:
        self._tell(b"c")

    def stop(self) -> None:
        """The step under way is finished and saved."""
        if not self.ended:
            self._process.terminate()

    def leave(self) -> None:
        """Its input ends, and with it the run, saved."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _tell(self, order: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has just ended
            self._process.stdin.write(order)
