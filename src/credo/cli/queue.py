"""`credo queue`: the runs of a list, some at a time, each in a process of its own; what fails is noted and passed over.

The queue itself keeps nothing: what is finished, interrupted or failed is read from the run folders, and from the
records of runs whose folders are elsewhere. So it may be killed at any moment, and the same command goes on. Two
queues, or a queue and `credo run`, never work on one run: the lock of its folder decides, and a worker that finds it
taken says so and is started again later.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final

from rich.console import Console

from credo.cli.exits import BUSY, FAILED, INTERRUPTED, OK, TERMINATED
from credo.cli.queue_view import View, show_status
from credo.errors import CredoError, InvalidValue, LockedError
from credo.experiments.checkpoint import is_finished
from credo.experiments.lock import locked
from credo.experiments.queue_file import Job, load_queue
from credo.experiments.queue_state import WORKER_LOG, forget_failure, status_of, write_failure
from credo.experiments.records import share_record
from credo.experiments.run_folder import RunFolder
from credo.experiments.stopping import StopRequest, stop_request

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


LOOK: Final = 0.2  # seconds between two looks at the workers
AGAIN: Final = (
    10.0  # seconds until a run that another process works on, or that could not be started, is tried again
)
FULL: Final = 2**20  # bytes; a disk with less cannot hold a run
DEATHS: Final = 3  # of workers, by signals and without a step of progress, after which a run has failed


def queue(file: Path, options: Options, jobs: int, status: bool) -> int:
    if jobs < 1 or options.threads < 1:
        raise InvalidValue(f"--jobs and --threads must be at least 1, got {jobs} and {options.threads}")
    if not 0 <= options.nice <= 19:
        raise InvalidValue(f"--nice must be from 0 to 19, got {options.nice}")
    runs = load_queue(file)
    if status:
        show_status(
            Console(highlight=False), runs, options.out, options.results, lock_path(options.out, file), jobs
        )
        return OK
    options.out.mkdir(parents=True, exist_ok=True)
    with alone(options.out, file), stop_request() as stop, pause_request() as pause:
        return Scheduler(file, runs, options, jobs, stop, pause).work()


class Scheduler:
    def __init__(
        self, file: Path, runs: list[Job], options: Options, jobs: int, stop: StopRequest, pause: StopRequest
    ) -> None:
        self._file, self._runs, self._options, self._slots = file, runs, options, jobs
        self._stop, self._pause = stop, pause
        self._read_at = file.stat().st_mtime_ns
        self._workers: list[Worker] = []
        self._failed: dict[str, str] = {}  # titles → why, in this session
        self._done: set[str] = set()  # as far as this session knows
        self._stored: dict[str, bool] = {}  # of runs that nobody has begun here
        self._not_before: dict[str, float] = {}
        self._deaths: dict[str, tuple[int, int]] = {}  # titles → how many, and at which step
        self._view = View(options.out, options.results)

    def work(self) -> int:
        """Until nothing is left to do, or a stop is asked for."""
        try:
            with self._view:
                while self._step():
                    time.sleep(LOOK)
        finally:
            for worker in self._workers:  # after an error or a second Ctrl-C: they save and end by themselves
                worker.leave()
        if self._stop.signal is not None:
            self._view.say("stopped; the same command goes on")
            return INTERRUPTED if self._stop.signal == signal.SIGINT else TERMINATED
        done = sum(self._is_done(job) for job in self._runs)
        self._view.say(f"{done} of {len(self._runs)} runs finished, {len(self._failed)} failed")
        return FAILED if self._failed else OK

    def _step(self) -> bool:
        """One look; whether there is more to come."""
        for worker in [worker for worker in self._workers if worker.ended]:
            self._workers.remove(worker)
            self._account(worker)
        if self._pause.signal is not None:
            self._wait_for_continue()
        if self._stop.signal is not None:
            for worker in self._workers:
                worker.stop()
            return bool(self._workers)
        self._read_again()
        free = len(self._workers) < self._slots
        waiting = self._waiting() if free else []  # a look at every folder of the list
        self._fill(waiting)
        self._view.show(self._runs, [w.job.title for w in self._workers], self._slots, self._failed)
        return bool(self._workers or waiting)

    def _waiting(self) -> list[Job]:
        taken = {worker.job.title for worker in self._workers}
        left = [job for job in self._runs if job.title not in taken and not self._is_done(job)]
        return [job for job in left if job.title not in self._failed]

    def _fill(self, waiting: list[Job]) -> None:
        now = time.monotonic()
        for job in waiting:
            if len(self._workers) >= self._slots:
                return
            if self._not_before.get(job.title, now) > now or not self._is_ready(job):
                continue
            try:
                self._workers.append(Worker(job, self._options))
            except OSError as error:  # no folder, no log, no process
                self._note_failure(job, FAILED, f"{error}")
                continue
            forget_failure(job.folder(self._options.out))
            self._view.say(f"{job.title}: begins")

    def _is_ready(self, job: Job) -> bool:
        """An ensemble waits for its members, and fails with them."""
        out = self._options.out
        members = set(job.members(out))
        failed = [
            other for other in self._runs if other.title in self._failed and other.folder(out) in members
        ]
        if failed:
            self._note_failure(job, FAILED, f"its member {failed[0].title} has failed")
            return False
        return all(RunFolder(member).finished for member in members)

    def _is_done(self, job: Job) -> bool:
        """Finished, with its record; a folder with another run in it is a failure, found before a worker is."""
        folder, results = job.folder(self._options.out), self._options.results
        if job.title in self._done:
            return True
        if job.title in self._failed:
            return False
        if not RunFolder(folder).finished:
            return self._is_stored(job)
        try:
            is_finished(RunFolder(folder), job.training, job.seed)
        except (CredoError, OSError) as error:
            self._note_failure(job, FAILED, str(error))
            return False
        if results is not None and not job.record(results).exists():
            return False
        self._done.add(job.title)
        return True

    def _is_stored(self, job: Job) -> bool:
        """Its record came from another machine; members of an ensemble that has none are needed themselves."""
        out, results = self._options.out, self._options.results
        if job.title not in self._stored:
            needed = any(
                job.folder(out) in other.members(out) and not other.is_recorded(results)
                for other in self._runs
                if other.ensemble
            )
            begun = RunFolder(job.folder(out)).checkpoints.is_dir()
            self._stored[job.title] = (
                not needed and not begun and (job.is_recorded(results) or self._shares(job))
            )
        return self._stored[job.title]

    def _shares(self, job: Job) -> bool:
        """The same training stands in several recipes, and is done once; its record is written for each of them."""
        results = self._options.results
        if results is None or job.ensemble:
            return False
        try:
            source = share_record(results, job.record(results), job.name, job.training, job.seed)
        except OSError as error:
            self._note_failure(job, FAILED, f"{error}")
            return False
        if source is not None:
            self._view.say(f"{job.title}: stored; it is the same run as {source}")
        return source is not None

    def _account(self, worker: Worker) -> None:
        job, code = worker.job, worker.code
        folder = job.folder(self._options.out)
        if code == OK:
            self._view.finished(job)
        elif code == BUSY:
            self._not_before[job.title] = time.monotonic() + AGAIN
            self._view.say(f"{job.title}: {worker.last_words()}")
        elif code in (INTERRUPTED, TERMINATED, -signal.SIGTERM):  # the last: while it was still importing
            self._not_before[job.title] = time.monotonic() + AGAIN
            self._view.say(f"{job.title}: interrupted, will go on from its last step")
        elif code < 0:
            self._account_for_death(job, -code)
        else:
            self._note_failure(
                job, code, worker.last_words() or f"the worker ended with code {code}{_why(folder)}"
            )

    def _account_for_death(self, job: Job, number: int) -> None:
        step = status_of(job.folder(self._options.out)).step
        deaths, before = self._deaths.get(job.title, (0, -1))
        deaths = 1 if step > before else deaths + 1
        self._deaths[job.title] = deaths, step
        words = f"the worker was ended by signal {number} ({signal.Signals(number).name})"
        if deaths >= DEATHS:
            self._note_failure(job, -number, f"{words}, {deaths} times without a step of progress")
        else:
            self._view.say(f"{job.title}: {words}; it will go on from its last checkpoint")

    def _note_failure(self, job: Job, code: int, message: str) -> None:
        self._failed[job.title] = message
        write_failure(job.folder(self._options.out), code, message)
        self._view.say(f"{job.title}: failed: {message}")

    def _read_again(self) -> None:
        """The list may be edited while the queue works; what is under way stays under way."""
        try:
            changed = self._file.stat().st_mtime_ns
            if changed == self._read_at:
                return
            self._read_at = changed
            self._runs, self._done, self._stored = load_queue(self._file), set(), {}
            self._view.say(f"{self._file} was read again: {len(self._runs)} runs")
        except (CredoError, OSError) as error:
            self._view.say(f"{error} The list stays as it was.")

    def _wait_for_continue(self) -> None:
        """As Ctrl-Z asks: the runs wait between two steps, and this process stops until SIGCONT."""
        self._pause.signal = None
        for worker in self._workers:
            worker.pause()
        self._view.say(f"paused; kill -CONT {os.getpid()} (or fg) lets it go on")
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in self._workers:
            worker.go_on()
        self._view.say("goes on")


def _why(folder: Path) -> str:
    """Of a worker that left no word: a full disk takes no log either."""
    full = shutil.disk_usage(folder).free < FULL
    return f"; no space is left on the disk of {folder}, not even for its log" if full else ""


def lock_path(out: Path, file: Path) -> Path:
    return out / f".queue-{file.stem}.lock"


@contextmanager
def alone(out: Path, file: Path) -> Iterator[None]:
    """One queue for one list; a second would only make the workers twice as many."""
    try:
        with locked(lock_path(out, file)):
            yield
    except LockedError as error:
        raise LockedError(f"this queue is at work already: {error}") from error


@contextmanager
def pause_request() -> Iterator[StopRequest]:
    """SIGTSTP (Ctrl-Z) becomes a request, where the system has it."""
    request = StopRequest()
    number: int | None = getattr(signal, "SIGTSTP", None)
    if number is None:
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number

    before = signal.signal(number, note)
    try:
        yield request
    finally:
        signal.signal(number, before)
