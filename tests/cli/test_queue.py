"""`credo queue`: killed at any moment it ends as if it had not been; what is wrong with one run harms no other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from credo.cli import main
from credo.cli.exits import BUSY, FAILED, OK, TERMINATED
from credo.cli.queue import Options, Scheduler
from credo.experiments.lock import living_holder, locked
from credo.experiments.queue_file import load_queue
from credo.experiments.queue_state import status_of
from credo.experiments.records import read_record, share_record
from credo.experiments.run_folder import TIMES, RunName, described
from credo.experiments.stopping import StopRequest
from tests.cli.queueing import prepare

ROOT = Path(__file__).resolve().parents[2]
RUNS = [(row, seed) for row in ("adam", "vogn") for seed in (0, 1, 2)]
BITWISE = ("model.safetensors", "posterior.safetensors", "predictions.safetensors")


def harness(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.cli.queueing", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


def run_folder(base: Path, row: str, seed: int) -> Path:
    return base / "runs" / "small" / "cpu" / row / f"seed-{seed}"


def record(base: Path, row: str, seed: int) -> Path:
    return base / "results" / "small" / "cpu" / f"{row}-seed-{seed}.jsonl"


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in line.items() if key not in TIMES | {"started", "changes", "commit"}}
    if "as_trained" in left:
        left["as_trained"] = {k: v for k, v in left["as_trained"].items() if not k.startswith("seconds")}
    return left


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A queue that nobody has disturbed; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    found = harness("run", folder)
    assert found.returncode == OK, found.stderr
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_killed_at_random_moments_all_runs_end_bitwise_as_undisturbed(finished: Path, tmp_path: Path) -> None:
    found = harness("kill", tmp_path, 10)
    assert found.returncode == OK, found.stderr
    assert "killed 10 times" in found.stdout
    for row, seed in RUNS:
        for name in BITWISE:
            one, other = (
                safetensors.torch.load_file(run_folder(base, row, seed) / name)
                for base in (finished, tmp_path)
            )
            assert (
                one.keys() == other.keys()
            )  # tensors, not files: safetensors writes its header in any order
            assert all(torch.equal(one[key], other[key]) for key in one), f"{row} {seed} {name}"
        lines = [
            [without_times(line) for line in read_record(record(base, row, seed))]
            for base in (finished, tmp_path)
        ]
        assert str(lines[0]) == str(lines[1])


def test_a_finished_queue_has_nothing_left_to_do(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")}
    assert len([path for path in before if "results" in path.parts]) == len(RUNS)
    assert main(prepare(finished)) == OK
    assert "6 of 6 runs finished, 0 failed" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")} == before


def test_a_record_holds_all_that_a_page_needs(finished: Path) -> None:
    lines = read_record(record(finished, "vogn", 0))
    kinds = [line["kind"] for line in lines]
    assert kinds == ["run", *["epoch"] * 5, "final", "ood", "calibration", "entropy"]
    head, final = lines[0], lines[kinds.index("final")]
    assert (head["recipe"], head["row"], head["seed"]) == ("small", "vogn", 0)
    assert head["training"]["validation_size"] == 100
    assert head["machine"]["threads"] == 1
    assert final["fitted_on"] == "validation"
    assert final["after_temperature"]["accuracy"] == final["as_trained"]["accuracy"]
    assert sum(lines[-1]["counts"]["test"]) == final["examples"] == 100
    assert sum(lines[-2]["as_trained"]["examples"]) == 100


def damage_checkpoints(base: Path, row: str, seed: int) -> None:
    folder = run_folder(base, row, seed)
    (folder / "result.json").unlink()
    for path in folder.rglob("state.json"):
        path.write_bytes(b"x" + path.read_bytes()[1:])


def other_finished_run(base: Path, row: str, seed: int) -> None:
    """The folder holds a run with another width."""
    path = run_folder(base, row, seed) / "config.json"
    config = json.loads(path.read_text())
    config["training"]["model_options"]["width"] = 9
    path.write_text(json.dumps(config))


def other_interrupted_run(base: Path, row: str, seed: int) -> None:
    """With another learning rate, which a single run may change on its way; a queue must not."""
    path = run_folder(base, row, seed) / "config.json"
    config = json.loads(path.read_text())
    config["training"]["settings"]["lr"] = 0.5
    path.write_text(json.dumps(config))
    (path.parent / "result.json").unlink()


def damage_log(base: Path, row: str, seed: int) -> None:
    """Of a finished run whose record is missing."""
    record(base, row, seed).unlink()
    (run_folder(base, row, seed) / "log.jsonl").write_text("{")


def file_in_the_way(base: Path, row: str, seed: int) -> None:
    """Of a run that is not stored yet; else its folder is not looked at."""
    record(base, row, seed).unlink()
    folder = run_folder(base, row, seed)
    shutil.rmtree(folder)
    folder.write_text("not a folder")


TROUBLE = {
    ("adam", 0): (damage_checkpoints, "SHA-256"),
    ("adam", 1): (other_finished_run, "holds another run: model_options was"),
    ("adam", 2): (other_interrupted_run, "holds another run: settings was"),
    ("vogn", 0): (damage_log, "log.jsonl is damaged"),
    ("vogn", 1): (file_in_the_way, "File exists"),
}


def test_trouble_with_one_run_is_told_and_the_queue_goes_on(copy: Path) -> None:
    for run, (spoil, _) in TROUBLE.items():
        spoil(copy, *run)
    lost = record(copy, "vogn", 2)
    before = lost.read_bytes()
    lost.unlink()  # something is left to do: the same bytes again
    kept = {path: path.read_bytes() for path in copy.rglob("*.safetensors")}
    found = harness("run", copy)
    assert found.returncode == FAILED
    for (row, seed), (_, message) in TROUBLE.items():
        told = [
            line for line in found.stderr.splitlines() if f"small cpu {row} seed {seed}: failed: " in line
        ]
        assert len(told) == 1
        assert message in told[0]
    assert "Traceback" not in found.stderr
    assert "1 of 6 runs finished, 5 failed" in found.stderr
    assert lost.read_bytes() == before
    there = {path.name: path.read_bytes() for path in copy.rglob("*.safetensors")}
    assert len(list(copy.rglob("*.safetensors"))) == len(
        kept
    )  # damaged checkpoints are set aside, not deleted
    assert there.keys() == {path.name for path in kept}


def test_a_full_disk_fails_its_runs_and_no_other(copy: Path) -> None:
    for row, seed in (("vogn", 0), ("vogn", 1), ("adam", 0)):
        shutil.rmtree(run_folder(copy, row, seed))
        record(copy, row, seed).unlink()
    found = harness("run", copy, "vogn")
    assert found.returncode == FAILED
    assert found.stderr.count("No space left on device") >= 2
    assert (run_folder(copy, "adam", 0) / "result.json").exists()
    assert status_of(run_folder(copy, "vogn", 0)).state == "failed"
    assert "No space left" in status_of(run_folder(copy, "vogn", 0)).message
    again = harness("run", copy)  # with room again, the same command goes on
    assert again.returncode == OK, again.stderr
    assert status_of(run_folder(copy, "vogn", 0)).state == "finished"


def test_status_is_a_table_and_changes_nothing(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder(copy, "vogn", 1))
    record(copy, "vogn", 1).unlink()
    (run_folder(copy, "vogn", 0) / "result.json").unlink()
    before = sorted(copy.rglob("*"))
    assert main([*prepare(copy), "--status"]) == OK
    shown = capfd.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.startswith("0 ")]
    assert [(row[3], row[4], row[5]) for row in rows] == [
        ("adam", "0", "finished"),
        ("adam", "1", "finished"),
        ("adam", "2", "finished"),
        ("vogn", "0", "interrupted"),
        ("vogn", "1", "waiting"),
        ("vogn", "2", "finished"),
    ]
    assert "4 of 6 finished, 0 failed" in shown
    assert "to go" in shown
    assert sorted(copy.rglob("*")) == before


def test_what_another_machine_has_stored_is_not_run_again(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fresh clone has the records and no run folder. A record of other settings, or cut off, is not the run's."""
    shutil.rmtree(copy / "runs")
    other, cut = record(copy, "adam", 1), record(copy, "vogn", 2)
    head, *rest = other.read_text().splitlines()
    changed = json.loads(head)
    changed["training"]["samples"] = 4
    other.write_text("\n".join([json.dumps(changed), *rest]))
    cut.write_text(cut.read_text().splitlines()[0])
    assert main([*prepare(copy), "--status"]) == OK
    shown = capfd.readouterr().out
    states = {
        tuple(line.split()[3:5]): line.split()[5] for line in shown.splitlines() if line.startswith("0 ")
    }
    assert states == {
        (row, str(seed)): "waiting" if (row, seed) in [("adam", 1), ("vogn", 2)] else "stored"
        for row, seed in RUNS
    }
    assert "4 of 6 finished, 0 failed" in shown
    before = record(copy, "vogn", 0).stat().st_mtime_ns
    assert main(prepare(copy)) == OK
    assert "6 of 6 runs finished, 0 failed" in capfd.readouterr().err
    ran = sorted(
        path.parent.relative_to(copy / "runs" / "small" / "cpu") for path in copy.rglob("result.json")
    )
    assert ran == [Path("adam/seed-1"), Path("vogn/seed-2")]
    assert record(copy, "vogn", 0).stat().st_mtime_ns == before
    assert read_record(other)[0]["training"]["samples"] == 3
    assert read_record(cut)[-1]["kind"] == "entropy"


def test_the_same_training_in_two_recipes_is_done_once(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The record of the second is that of the first, but for names; another seed or setting is a run of its own."""
    file = copy / "queue.toml"
    text = (copy / "small.toml").read_text().replace('name = "small"', 'name = "again"')
    (copy / "again.toml").write_text(text)
    file.write_text(
        '[[runs]]\nrecipe = "again.toml"\nrow = "adam"\nseeds = [0, 7]\n'
        '[[runs]]\nrecipe = "again.toml"\nrow = "vogn"\nseed = 0\nsettings = { samples = 5 }\n'
    )
    options = Options(copy / "runs", copy / "results", None, 1, 0, "cpu")
    found = Scheduler(file, load_queue(file), options, 1, StopRequest(), StopRequest())
    assert [job.title for job in found._waiting()] == [
        "again cpu adam seed 7",
        "again cpu vogn+samples=5 seed 0",
    ]
    assert (
        "again cpu adam seed 0: stored; it is the same run as small/cpu/adam-seed-0" in capfd.readouterr().err
    )
    shared = read_record(copy / "results" / "again" / "cpu" / "adam-seed-0.jsonl")
    first = read_record(record(copy, "adam", 0))
    assert shared[0] == {**first[0], "recipe": "again", "same_as": "small/cpu/adam-seed-0"}
    assert shared[1:] == first[1:]
    assert load_queue(file)[0].is_recorded(copy / "results")


def test_unfamiliar_sets_that_a_shared_record_should_not_have_are_left_out(tmp_path: Path) -> None:
    prepare(tmp_path)
    job = load_queue(tmp_path / "queue.toml")[0]
    asked = replace(job.training, ood=("svhn",))
    met = {**described(replace(job.training, ood=("svhn", "scenes_crop"))), "ood": ["svhn", "scenes_crop"]}
    lines = [
        {"kind": "run", "format": 1, "recipe": "a", "row": "r", "size": "cpu", "seed": 0, "training": met},
        {"kind": "final", "as_trained": {"nll": 1.0, "ood_auroc.svhn": 0.5, "ood_auroc.scenes_crop": 0.6}},
        {"kind": "ood", "data": "svhn"},
        {"kind": "ood", "data": "scenes_crop"},
        {"kind": "entropy", "counts": {"test": [1], "svhn": [2], "scenes_crop": [3]}},
    ]
    source = tmp_path / "a" / "cpu" / "r-seed-0.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "b" / "cpu" / "r-seed-0.jsonl"
    name = RunName("b", "r", "cpu")
    assert share_record(tmp_path, path, name, replace(asked, ood=("svhn", "mnist")), 0) is None
    assert share_record(tmp_path, path, name, asked, 1) is None
    assert share_record(tmp_path, path, name, asked, 0) == "a/cpu/r-seed-0"
    found = read_record(path)
    assert found[0]["training"]["ood"] == ["svhn"]
    assert found[1:] == [
        {"kind": "final", "as_trained": {"nll": 1.0, "ood_auroc.svhn": 0.5}},
        {"kind": "ood", "data": "svhn"},
        {"kind": "entropy", "counts": {"test": [1], "svhn": [2]}},
    ]


def test_members_of_an_ensemble_are_needed_themselves(copy: Path) -> None:
    """Its predictions are those of the members' folders; once it is stored, nothing is."""
    file = copy / "queue.toml"
    file.write_text('[[runs]]\nrecipe = "small.toml"\nrow = "adam"\nensemble = 3\n')
    options = Options(copy / "runs", copy / "results", None, 1, 0, "cpu")
    shutil.rmtree(copy / "runs" / "small" / "cpu" / "adam" / "seed-1")
    runs = load_queue(file)
    whole = runs[-1]
    found = Scheduler(file, runs, options, 1, StopRequest(), StopRequest())
    assert [job.seed for job in found._waiting() if not job.ensemble] == [1]
    lines = record(copy, "adam", 0).read_text().splitlines()
    stored = json.dumps({**json.loads(lines[0]), "row": whole.label, "ensemble": 3})
    whole.record(copy / "results").write_text("\n".join([stored, *lines[1:]]))
    assert Scheduler(file, runs, options, 1, StopRequest(), StopRequest())._waiting() == []


def test_a_second_queue_for_the_same_list_is_refused(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked(finished / "runs" / ".queue-queue.lock"):
        assert main(prepare(finished)) == BUSY
    assert "this queue is at work already" in capfd.readouterr().err


def scheduler(tmp_path: Path) -> Scheduler:
    prepare(tmp_path)
    options = Options(tmp_path / "runs", tmp_path / "results", None, 1, 0, "cpu")
    file = tmp_path / "queue.toml"
    return Scheduler(file, load_queue(file), options, 1, StopRequest(), StopRequest())


def test_the_list_is_read_again_when_it_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, file = scheduler(tmp_path), tmp_path / "queue.toml"
    assert len(found._waiting()) == 6
    file.write_text(file.read_text().replace("[0, 1, 2]", "[5]"))
    os.utime(file, ns=(0, 1))
    found._read_again()
    assert [(job.row, job.seed) for job in found._waiting()] == [("adam", 5), ("vogn", 5)]
    file.write_text("[[runs]]\nrecipe = 'smal'")
    os.utime(file, ns=(0, 2))
    found._read_again()
    assert len(found._waiting()) == 2
    assert "unknown recipe 'smal'" in capfd.readouterr().err.replace("\n", " ")


def test_a_worker_that_dies_again_and_again_without_progress_is_a_failure(tmp_path: Path) -> None:
    found = scheduler(tmp_path)
    job = found._waiting()[0]
    folder = job.folder(tmp_path / "runs")
    folder.mkdir(parents=True)
    for step in (3, 5, 5):  # with progress in between it is tried again
        (folder / "progress.json").write_text(json.dumps({"step": step, "steps": 9}))
        found._account_for_death(job, signal.SIGKILL)
        assert job in found._waiting()
    found._account_for_death(job, signal.SIGKILL)
    assert job not in found._waiting()
    assert status_of(folder).state == "failed"
    assert "signal 9 (SIGKILL), 3 times" in status_of(folder).message


def test_pausing_going_on_and_stopping(tmp_path: Path) -> None:
    """The real command: SIGTSTP holds the run between two steps, SIGCONT lets it go, SIGTERM saves it and ends all."""
    words = prepare(tmp_path)
    recipe = tmp_path / "small.toml"
    recipe.write_text(recipe.read_text().replace("epochs = 5", "epochs = 100000"))
    folder = run_folder(tmp_path, "adam", 0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "credo", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_until(lambda: status_of(folder).step > 0)
        worker = living_holder(folder / "lock")
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(process.pid) == "T")
        held = settled(folder)
        time.sleep(2.5)  # longer than between two news of a run that goes on
        assert settled(folder) == held
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: status_of(folder).step > held)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == TERMINATED
        assert "the same command goes on" in str(process.stderr and process.stderr.read())
    assert worker is not None
    assert state_of(worker) == ""
    assert status_of(folder).state == "interrupted"


def wait_until(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def settled(folder: Path) -> int:
    """The step a paused run stands at: its news come every two seconds, so wait for two that agree."""
    step = -1
    while step != status_of(folder).step:
        step = status_of(folder).step
        time.sleep(2.5)
    return step


def state_of(pid: int) -> str:
    """T: stopped; nothing: gone, or not yet collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state == "Z" else state


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux with autogroups only")
def test_a_worker_leaves_the_machine_to_other_sessions_too() -> None:
    code = (
        "import os; from credo.cli.worker import AUTOGROUP, leave_to_others; leave_to_others(19); "
        "print(os.nice(0), AUTOGROUP.read_text())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert found.stdout.startswith("19 ")
    assert found.stdout.strip().endswith("nice 19")


def test_what_is_finished_is_read_without_a_word_on_versions(
    copy: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Its numbers do not change; a queue of two threads looks at runs of one."""
    config = run_folder(copy, "adam", 0) / "config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps({**facts, "kernels": "other"}))
    assert main(prepare(copy)) == OK
    assert not [str(seen.message) for seen in recwarn if "was written with" in str(seen.message)]
