"""One writer per folder (row 60)."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from credo.errors import LockedError
from credo.experiments.lock import locked

HOLDER = """
import sys, pathlib
sys.modules["torch"] = sys  # the lock alone needs no torch
import importlib.util, types
{stubs}
spec = importlib.util.spec_from_file_location("lock", {path!r})
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
with lock.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
STUBS = """
credo, errors = types.ModuleType("credo"), types.ModuleType("credo.errors")
errors.LockedError = type("LockedError", (OSError,), {})
sys.modules["credo"], sys.modules["credo.errors"] = credo, errors
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock."""
    import credo.experiments.lock as module

    code = HOLDER.format(stubs=STUBS, path=module.__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_row_60_the_holder_is_named(tmp_path: Path, holder) -> None:
    with (
        pytest.raises(LockedError, match=f"process {holder.pid} on host {socket.gethostname()}"),
        locked(tmp_path / "lock"),
    ):
        pass


def test_row_60_a_dead_holder_is_recognised(tmp_path: Path, holder) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "lock").exists()
    with pytest.warns(UserWarning, match=f"stale: process {holder.pid}"), locked(tmp_path / "lock"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_row_60_the_same_process_cannot_write_twice_either(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        with pytest.raises(LockedError, match=f"process {os.getpid()}"), locked(tmp_path / "lock"):
            pass
        assert (tmp_path / "lock").exists()


def test_row_60_another_host_is_never_taken_for_dead(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "today"}))
    with pytest.raises(LockedError, match=r"process 1 on host elsewhere.*another machine"), locked(path):
        pass
    assert json.loads(path.read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("text", ["", "{", '{"pid": 12'])
def test_row_60_a_lock_cut_off_while_being_signed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    if text:
        with pytest.warns(UserWarning, match="stale"), locked(path):
            pass
    else:
        with locked(path):
            pass


def test_row_60_of_many_at_once_one_writes(tmp_path: Path) -> None:
    inside, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        for _ in range(50):
            try:
                with locked(tmp_path / "lock"):
                    with lock:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    with lock:
                        inside[0] -= 1
            except LockedError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_the_lock_goes_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "lock"):
        _ = 1 / 0
    assert not (tmp_path / "lock").exists()
