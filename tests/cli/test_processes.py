"""`credo run` as several processes: exit codes, what is said and by whom; under torchrun itself, killed and resumed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from credo import cli
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.lock import locked
from tests.continual import ranked as streamed
from tests.distributed.processes import RankFailed, on_ranks
from tests.experiments import ranked
from tests.experiments.test_resume import assert_same

pytest.importorskip("tyro")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 30
RUN = Path("digits", "cpu", "adam", "seed-0")


def free_ports(count: int = 1) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]


def digits(out: Path, epochs: int = 2) -> list[str]:
    return ["run", "digits", "--only", "adam", "--set", f"epochs={epochs}", "--out", str(out)]


def test_exit_codes_and_words_of_all_ranks(tmp_path: Path) -> None:
    lines = [
        digits(tmp_path / "runs"),
        [*digits(tmp_path / "other"), "--set", "epochs2=1"],
        digits(tmp_path / "in use"),
        ["run", "permuted-mnist", "--set", "epochs=1", "--out", str(tmp_path)],
        [*digits(tmp_path / "absent"), "--resume"],
        [*digits(tmp_path / "groups"), "--set", "mc_groups=3"],
    ]
    (tmp_path / "in use" / RUN).mkdir(parents=True)
    with locked(tmp_path / "in use" / RUN / "lock"):
        ranks = on_ranks(2, ranked.commands, free_ports(len(lines)), lines, "30", joined=False)
    assert not any(isinstance(rank, RankFailed) for rank in ranks), ranks
    first, second = ranks
    assert [code for code, _ in first] == [code for code, _ in second] == [0, 2, 4, 2, 2, 2]
    words = [
        "compare with",
        "unknown key 'epochs2'",
        "is being written by",
        "is a stream of tasks",
        "no checkpoint",
        "mc_groups",
    ]
    for expected, (_, one), (_, other) in zip(words, first, second, strict=True):
        assert (one + other).count(expected) == 1, (one, other)
    assert second[0][1] == ""


def test_a_stream_of_tasks_is_run_by_all_and_told_by_one(tmp_path: Path) -> None:
    first, second = on_ranks(2, streamed.command, free_ports(), tmp_path, joined=False)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1].count("adam seed 1:") == 1
    assert "table and figure:" in first[1]
    assert second[1] == ""
    assert (tmp_path / "permuted-mnist" / "cpu" / "table.md").exists()


@pytest.mark.parametrize("what", ["failed", "killed"])
def test_the_first_cause_is_told_and_the_checkpoint_is_whole(tmp_path: Path, what: str) -> None:
    survivor, other = on_ranks(2, ranked.failing_command, free_ports(), tmp_path, what, 2, joined=False)
    code, said = survivor
    assert code == 1
    assert "Traceback" not in said
    if what == "failed":
        assert "rank 1 failed first: a loader failed here" in said
        assert other[0] == 1
        assert "credo: a loader failed here" in other[1]
    else:
        assert isinstance(other, RankFailed)
        assert "waited for the other ranks in vain" in said
    assert Checkpoints(tmp_path / RUN / "checkpoint").load_last()["step"] == 0
    assert not (tmp_path / RUN / "lock").exists()


def test_row_67_half_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(digits(tmp_path)) == 1
    assert "torchrun --nproc-per-node 2 -m credo run" in capsys.readouterr().err
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--timeout", "0"), ("--device", "abacus"), ("--device", "meta:x")])
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert cli.main([*digits(tmp_path), *option]) == 2
    assert option[0] in capsys.readouterr().err


@contextlib.contextmanager
def torchrun(out: Path, *options: str) -> Iterator[Any]:
    """A real one; nothing of it is left afterwards, whatever happens."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command += ["--master-port", str(free_ports()[0]), "-m", "credo", *digits(out, EPOCHS)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        started = [process.pid, *workers(process.pid)]
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def workers(pid: int) -> list[int]:
    """The processes that torchrun has started; each is the leader of a session of its own."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def await_epochs(out: Path, epochs: int, process: Any) -> None:
    log, patience = out / RUN / "log.jsonl", time.monotonic() + 200
    while time.monotonic() < patience and process.poll() is None:
        if log.exists() and log.read_text().count("\n") >= epochs:
            return
        time.sleep(0.02)
    raise AssertionError(
        f"no epoch {epochs}: {process.communicate()[1] if process.poll() is not None else ''}"
    )


LEAVING = """
import weakref
import torch.distributed as dist
from credo.cli.launch import process_group

with process_group(30, "cpu"):
    import torch.distributed.nn.functional
    group = weakref.ref(dist.group.WORLD)
assert group() is None
"""


def test_nothing_of_a_group_outlives_it() -> None:
    """Its threads would, and abort the process if they are not done when the interpreter is."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0])}
    subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, env=os.environ | alone, check=True, timeout=100)


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the workers by /proc")
def test_torchrun_with_a_killed_worker_ends_as_undisturbed(tmp_path: Path) -> None:
    """First SIGTERM comes to a rank, which makes both save; then a worker is killed, and torchrun starts both again."""
    war, line = tmp_path / "war", digits(tmp_path / "peace", EPOCHS)
    ((peace, _),), _ = on_ranks(2, ranked.commands, free_ports(), [line], "30", joined=False)
    assert peace == 0
    first, second = on_ranks(2, ranked.failing_command, free_ports(), war, "terminated", EPOCHS, joined=False)
    assert (first[0], second[0]) == (143, 143)
    assert (first[1] + second[1]).count("terminated; the same command resumes") == 1
    assert Checkpoints(war / RUN / "checkpoint").load_last()["step"] == 5
    with torchrun(war, "--max-restarts", "1") as process:
        await_epochs(war, 3, process)
        os.kill(workers(process.pid)[-1], signal.SIGKILL)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert "exitcode: -9" in said
    assert_same(tmp_path / "peace" / RUN, war / RUN)
