"""`credo doctor`: its table, and that it sees what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import credo
from credo import cli
from credo.cli import exits
from credo.experiments import checkup

pytest.importorskip("tyro")

ROOT = Path(__file__).resolve().parents[2]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_all_is_right_here(capsys):
    assert cli.main(["doctor", "--quick", "--device", "cpu"]) == exits.OK
    out = capsys.readouterr().out
    assert "All is right" in out
    table = [cells(line) for line in out.splitlines() if line.startswith("|")]
    assert {len(row) for row in table} == {3}
    names = [row[0] for row in table]
    assert all(
        f"{method}, a step in float32" in names for method in credo.optim.__all__ if method in checkup.METHODS
    )
    assert {"device", "kernels on the CPU", "kernels on a GPU", "noise of training"} <= set(names)
    assert all(row[2] == "ok" for row in table if "differs" in row[1])


def test_every_method_is_looked_at():
    others = {"BayesianOptimizer", "GroupDiagnostics", "TemperingSchedule"}
    assert set(checkup.METHODS) == set(credo.optim.__all__) - others


def test_times_are_a_table(capsys, monkeypatch):
    monkeypatch.setattr(checkup, "METHODS", {})
    monkeypatch.setattr("credo.cli.doctor.SECONDS", 0.0)
    own = [checkup.Load("MLP", lambda: credo.models.MLP([6, 5, 10]), (4, 6))]
    monkeypatch.setattr(checkup, "LOADS", {False: tuple(own)})
    assert cli.main(["doctor", "--device", "cpu"]) == exits.OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| MLP")]
    _, adam, vogn, ratio, steps = cells(line)
    assert float(vogn.split()[0]) / float(adam.split()[0]) == pytest.approx(float(ratio), rel=0.1, abs=0.02)
    assert int(steps) == 3


@pytest.mark.parametrize("device", [False, True])
def test_the_four_networks_take_their_batches(device):
    assert len(checkup.LOADS[device]) == 4
    for load in checkup.LOADS[device]:
        assert load.network()(torch.zeros(2, *load.shape[1:])).shape == (2, 10)


def twice_as_far(model):
    """The second one made, the one that is looked at, steps too far."""
    twice_as_far.made += 1
    return torch.optim.SGD(model.parameters(), 0.1 * twice_as_far.made)


def failing(model):
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    ("build", "words"), [(twice_as_far, "differs by"), (failing, "RuntimeError: no kernel image is")]
)
def test_what_is_wrong_is_seen(build, words, capsys, monkeypatch):
    twice_as_far.made = 0
    monkeypatch.setattr(checkup, "METHODS", {"VOGN": build})
    assert cli.main(["doctor", "--quick", "--device", "cpu"]) == exits.FAILED
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("| VOGN, a step in float32")]
    assert words in line
    assert "**wrong**" in line
    assert "open an issue" in out


WRONG = {
    "too wide": lambda draws: draws * 1.02,
    "moved": lambda draws: draws + 0.02,
    "cut": lambda draws: draws.clamp(-2.5, 2.5),
    "zeros": torch.zeros_like,
    "not finite": lambda draws: draws / 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_noise_that_is_not_normal_is_seen(name, monkeypatch):
    wrong = WRONG[name](checkup.drawn(torch.device("cpu")))
    monkeypatch.setattr(checkup, "drawn", lambda device: wrong)
    assert not checkup.normal_noise(torch.device("cpu"))[1]


def test_no_gpu_is_one_line(capsys):
    assert cli.main(["doctor", "--device", "cuda"]) == exits.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1


ELSEWHERE = """
from tests.device.emulated import Device
from credo import cli
with Device():
    raise SystemExit(cli.main(["doctor", "--quick", "--device", "npu"]))
"""


def test_on_another_device():
    """The emulated one: nothing is mixed, and plain torch for accelerators is right."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert "| device | npu | |" in found.stdout
