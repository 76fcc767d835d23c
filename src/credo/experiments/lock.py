"""One writer per folder: a lock file that names its holder, held by the system for as long as the holder lives.

The lock itself is `flock`, which the system drops when a process dies, however it dies; so what a dead process has left
is recognised as stale, and two processes can never both take it over. The text in the file is for people, and for
folders shared between machines, where `flock` may not reach: a lock of another host is only ever broken by hand.
"""

import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from credo.errors import LockedError

try:
    import fcntl
except ImportError:  # Windows: a file that exists is a lock, and a stale one is removed by hand
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; LockedError at once if another process does."""
    descriptor = _acquire(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_EXCL if fcntl is None else 0), 0o644)
        try:
            if _take(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our opening and our locking: try again


def _take(descriptor: int, path: Path) -> bool:
    """Lock and sign; False if what was locked is no longer the file at `path`."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(f"{path.parent} is being written by {_holder(descriptor)}. {_REMEDY}") from None
        if not _is_at(descriptor, path):
            return False
        _judge_what_was_left(descriptor, path)
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T%z")})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)
    return True


_REMEDY = "Wait for it, stop it, or choose another folder; if it is gone, delete the file named lock."


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _judge_what_was_left(descriptor: int, path: Path) -> None:
    """We hold the lock, and yet there is a name in it: its holder died, if it lived on this machine."""
    left = _read(descriptor)
    if left.get("host", socket.gethostname()) != socket.gethostname():
        raise LockedError(f"{path.parent} is locked by {_holder(descriptor)}, on another machine. {_REMEDY}")
    if left:
        warnings.warn(f"{path} is stale: {_holder(descriptor)} is gone without removing it.", stacklevel=5)


def _holder(descriptor: int) -> str:
    left = _read(descriptor)
    return f"process {left.get('pid', '?')} on host {left.get('host', '?')} (since {left.get('since', '?')})"


def _read(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {"host": socket.gethostname()}  # cut off while signing
    return found if isinstance(found, dict) else {}


def living_holder(path: Path) -> int | None:
    """The process that a lock file names, if it lives on this machine; only a look, which takes no lock."""
    try:
        left = json.loads(path.read_bytes())
        pid, host = int(left["pid"]), left["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if host == socket.gethostname() and _lives(pid) else None


def _lives(pid: int) -> bool:
    if os.name == "nt":  # there a signal of 0 would be a real one
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False
    try:  # one that has ended, and whose exit code was not asked for, still takes signals
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
