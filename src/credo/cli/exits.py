"""Exit codes, and which error ends in which.

| code | meaning |
|---|---|
| 0 | done, or nothing was left to do |
| 1 | failed: training diverged, the disk is full, a network address does not answer |
| 2 | the command line is wrong: an unknown name, a value out of range, an extra that is not installed |
| 3 | bad data: a file is missing, damaged, of another version or not what it should be |
| 4 | the run folder is in use by another process |
| 130, 143 | interrupted (Ctrl-C), terminated (SIGTERM); run the same command again to resume |
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from credo.errors import CredoError, IntegrityError, InvalidType, InvalidValue, LockedError, VersionError
from credo.experiments.stopping import EXIT_CODE_TERMINATED, Terminated

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
BAD_DATA: Final = 3
BUSY: Final = 4
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
TERMINATED: Final = EXIT_CODE_TERMINATED

# The first class that fits decides.
CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (KeyboardInterrupt, INTERRUPTED),
    (Terminated, TERMINATED),
    (BrokenPipeError, OK),  # the reader has seen enough: `credo list | head -1`
    (LockedError, BUSY),
    (IntegrityError, BAD_DATA),
    (VersionError, BAD_DATA),
    (FileNotFoundError, BAD_DATA),
    (NotADirectoryError, BAD_DATA),
    (IsADirectoryError, BAD_DATA),
    (InvalidValue, USAGE),
    (InvalidType, USAGE),
    (ModuleNotFoundError, USAGE),
    (CredoError, FAILED),
    (OSError, FAILED),
    (MemoryError, FAILED),
)


def exit_code(error: BaseException) -> int | None:
    """None for what is a mistake in credo itself, which deserves its traceback."""
    if isinstance(error, SystemExit) and not isinstance(
        error, Terminated
    ):  # the parser has said what is wrong
        return error.code if isinstance(error.code, int) else USAGE
    return next((code for kind, code in CODES if isinstance(error, kind)), None)


def message_of(error: BaseException) -> str | None:
    """One line, whatever the error holds; None where silence is right."""
    if isinstance(error, KeyboardInterrupt | Terminated):
        return f"{'interrupted' if isinstance(error, KeyboardInterrupt) else 'terminated'}; the same command resumes"
    if isinstance(error, BrokenPipeError | SystemExit):
        return None
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is missing; install with: pip install 'credo[experiments]'"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises; threads other than the main one cannot receive signals and are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated()
