"""Recipes of streams of tasks on data of a few pixels: every row, stopping and going on, the table and the figure."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.cli.worker import Orders, work
from credo.continual import MultiHead
from credo.data import Examples, Splits
from credo.errors import IntegrityError, InvalidValue
from credo.experiments import Recipe, Row, report
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.overrides import check_training
from credo.experiments.queue_file import job_of, load_queue
from credo.experiments.queue_state import status_of
from credo.experiments.recipes import RECIPES, recipe
from credo.experiments.records import read_record, write_record
from credo.experiments.results import load_results
from credo.experiments.run import run, run_path
from credo.experiments.run_folder import RunName
from credo.experiments.stopping import StopRequest, Terminated
from credo.experiments.streams import learner_for, model_for, permuted, split
from credo.experiments.train import train

STREAMS = [found for found in RECIPES.values() if found.is_stream]


def splits(classes: int = 4, n: int = 80) -> Splits:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(n) % classes
    centres = torch.randint(0, 200, (classes, 1, 4, 4), generator=generator)
    images = (centres[targets] + torch.randint(0, 50, (n, 1, 4, 4), generator=generator)).to(torch.uint8)
    train, test = (Examples(images[rows], targets[rows]) for rows in (slice(0, 60), slice(60, n)))
    return Splits("tiny", train, test)


def tiny(found: Recipe) -> Recipe:
    """The recipe with its own methods and settings, at a size for tests."""
    size = {"epochs": 2, "batch_size": 20, "samples": 3, "data": splits, "model_options": {"width": 5}}
    return replace(
        found,
        rows=tuple(
            replace(row, cpu=replace(row.cpu, **size, tasks=replace(row.cpu.tasks, count=2)))
            for row in found.rows
        ),
    )


def row_of(found: Recipe, name: str) -> Row:
    return next(row for row in found.rows if row.name == name)


def run_row(found: Recipe, row: Row, seed: int, out: Path) -> dict[str, Any]:
    """All that is stored of a finished run."""
    folder = run_path(out, found.name, "cpu", row.name, seed)
    return train(row.cpu, seed, folder, name=RunName(found.name, row.name, "cpu")).facts


@pytest.mark.parametrize("found", STREAMS, ids=lambda found: found.name)
def test_every_row_runs_and_the_report_has_them_all(found, tmp_path):
    results = run(tiny(found), seeds=2, out=tmp_path)
    assert len(results) == 2 * len(found.rows)
    text = report.write_table(tmp_path, results)
    assert (tmp_path / "table.md").read_text() == text
    lines = [line for line in text.splitlines() if line.startswith("|") and " credo 2 seeds " in line]
    assert len(lines) == len(found.rows)
    for label in ("VOGN", "VCL", "EWC", "Adam", "Adam, all tasks together"):
        assert any(line.startswith(f"| {label} |") for line in lines)
    published = [line for line in text.splitlines() if "| paper |" in line]
    assert len(published) == sum(bool(row.published) for row in found.rows)
    assert (tmp_path / "average-accuracy.png").stat().st_size > 10_000
    assert "MLP on" in text
    assert "2 tasks" in text
    for result in results:
        assert [len(row) for row in result.facts["matrix"]] == [1, 2]
        average = sum(result.facts["matrix"][1]) / 2
        assert (
            result.facts["average_accuracy"] == result.metrics["average_accuracy"] == pytest.approx(average)
        )


def test_a_stream_is_in_the_same_report_as_single_tasks(tmp_path):
    found = tiny(RECIPES["permuted-mnist"])
    run(found, only=["adam", "joint"], seeds=1, out=tmp_path)
    run(recipe("digits"), only=["adam"], out=tmp_path, overrides={"epochs": 1, "train_size": 40})
    results = load_results(tmp_path)
    assert [result.recipe for result in results] == ["digits", "permuted-mnist", "permuted-mnist"]
    pages = report.write(tmp_path / "report", results)
    page = pages[0].read_text()
    assert "Permuted MNIST" in page
    assert "Handwritten digits" in page
    assert "permuted-mnist-cpu-average_accuracy.png" in [path.name for path in pages]


def test_the_record_of_a_stream(tmp_path):
    found = tiny(RECIPES["permuted-mnist"])
    (result,) = run(found, only=["ewc"], seeds=1, out=tmp_path)
    head, final = read_record(write_record(result.folder, tmp_path / "record.jsonl"))
    assert (head["recipe"], head["row"], head["seed"]) == ("permuted-mnist", "ewc", 0)
    assert final["as_trained"]["average_accuracy"] == result.metrics["average_accuracy"]
    assert final["matrix"] == result.facts["matrix"]


@pytest.mark.parametrize("name", ["vogn", "vcl", "ewc", "joint"])
@pytest.mark.parametrize("after", [1, 5, 7])  # of 12 steps
def test_a_run_that_was_stopped_goes_on(name, after, tmp_path, monkeypatch):
    found = tiny(RECIPES["permuted-mnist"])
    row = row_of(found, name)
    whole = run_row(found, row, 0, tmp_path / "whole")
    steps = 0

    def asked(request):
        nonlocal steps
        steps += 1
        return signal.SIGTERM if steps == after else None

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "signal", property(asked, lambda request, value: None), raising=False)
        with pytest.raises(Terminated):
            run_row(found, row, 0, tmp_path / "cut")
    again = run_row(found, row, 0, tmp_path / "cut")
    assert again["matrix"] == whole["matrix"]
    folder = run_path(tmp_path / "cut", found.name, "cpu", name, 0)
    assert Checkpoints(folder / "checkpoint").complete() == []  # the result says all there is


def test_a_finished_run_is_read_and_another_is_refused(tmp_path):
    found = tiny(RECIPES["permuted-mnist"])
    adam = row_of(found, "adam")
    first = run_row(found, adam, 0, tmp_path)
    assert run_row(found, adam, 0, tmp_path) == first
    other = replace(adam, cpu=replace(adam.cpu, epochs=3))
    with pytest.raises(InvalidValue, match="another run: training"):
        run_row(found, other, 0, tmp_path)
    folder = run_path(tmp_path, found.name, "cpu", "adam", 0)
    with pytest.raises(InvalidValue, match="another run: training"):
        train(other.cpu, 0, folder)  # also without its name


def test_a_checkpoint_of_another_run_is_refused_and_stays(tmp_path, monkeypatch):
    found = tiny(RECIPES["permuted-mnist"])
    adam, folder = row_of(found, "adam"), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(
            StopRequest, "signal", property(lambda _: signal.SIGTERM, lambda *_: None), raising=False
        )
        with pytest.raises(Terminated):
            train(adam.cpu, 0, folder)
    before = [path.name for path in Checkpoints(folder / "checkpoint").complete()]
    with pytest.raises(InvalidValue, match="another run: training"):
        train(replace(adam.cpu, samples=4), 0, folder)
    assert [path.name for path in Checkpoints(folder / "checkpoint").complete()] == before
    assert (
        train(adam.cpu, 0, folder).facts["matrix"] == train(adam.cpu, 0, tmp_path / "whole").facts["matrix"]
    )


def test_damage_is_an_error_or_falls_back(tmp_path, monkeypatch):
    """As with a single task: the loop is the same."""
    adam, steps = row_of(tiny(RECIPES["permuted-mnist"]), "adam"), 0

    def asked(request):
        nonlocal steps
        steps += 1
        return signal.SIGTERM if steps == 5 else None

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "signal", property(asked, lambda *_: None), raising=False)
        with pytest.raises(Terminated):
            train(adam.cpu, 0, tmp_path / "run")
    *_, newest = Checkpoints(tmp_path / "run" / "checkpoint").complete()
    (newest / "state.json").write_text("{}")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(IntegrityError):
        train(adam.cpu, 0, tmp_path / "run")
    with pytest.warns(UserWarning, match="falling back"):
        again = train(adam.cpu, 0, tmp_path / "copy", resume="fallback")
    assert again.facts["matrix"] == train(adam.cpu, 0, tmp_path / "whole").facts["matrix"]
    with pytest.raises(InvalidValue, match="no checkpoint"):
        train(adam.cpu, 0, tmp_path / "new", resume=True)


def test_permuted_tasks():
    first, second = permuted(splits(), 2, seed=3)
    x, y = first.batch(torch.arange(5))
    moved, same = second.batch(torch.arange(5))
    assert torch.equal(x, splits().train.inputs[:5].flatten(1) / 255)
    assert torch.equal(y, same)
    assert not torch.equal(x, moved)
    assert torch.equal(x.sort(1).values, moved.sort(1).values)
    assert not torch.equal(moved, permuted(splits(), 2, seed=4)[1].batch(torch.arange(5))[0])


def test_split_tasks():
    tasks = split(splits(), 2)
    assert [task.head for task in tasks] == ["head_0", "head_1"]
    assert all(set(task.targets.tolist()) == {0, 1} for task in tasks)
    assert sum(len(task) for task in tasks) == 60
    with pytest.raises(InvalidValue, match="tasks=3"):
        split(splits(), 3)
    assert isinstance(model_for(row_of(RECIPES["split-mnist"], "vogn").cpu, tasks), MultiHead)


@pytest.mark.parametrize("name", ["vogn", "vcl"])
def test_heads_that_arrive_later_have_the_prior_of_the_first(name, tmp_path):
    """The first head's is the optimiser's `prior_precision`; the second's comes by way of the learner."""
    training = row_of(tiny(RECIPES["split-mnist"]), name).cpu
    training = replace(training, settings={**training.settings, "prior_precision": 7.0})
    tasks = split(splits(), 2)
    learner = learner_for(training, model_for(training, tasks), seed=0)
    first = learner.begin(tasks[0])
    learner.step(*first.batch(torch.arange(20)))
    learner.finish(first)
    learner.begin(tasks[1])
    optimizer = learner._optimizer
    head = dict(learner.model.named_parameters())["heads.head_1.weight"]
    torch.testing.assert_close(optimizer.state[head]["prior_precision"], torch.full_like(head, 7.0))


def test_the_papers_settings():
    found = RECIPES["permuted-mnist"]
    rows = {row.name: row.paper for row in found.rows}
    vogn = rows["vogn"]
    assert (vogn.tasks.count, found.seeds["paper"], vogn.model_options) == (
        10,
        20,
        {"width": 100, "layers": 2},
    )
    assert (vogn.epochs, vogn.batch_size, vogn.samples, vogn.tasks.start, vogn.tasks.last_lr) == (
        100,
        256,
        100,
        "fresh",
        1.0,
    )
    assert vogn.settings == {
        "lr": 1e-3,
        "momentum": 0.0,
        "ema_rate": 1e-3,
        "prior_precision": 1.0,
        "damping": 0.0,
        "initial_precision": 1e6,
        "mc_samples": 10,
        "vectorized": True,
    }
    assert (rows["vcl"].epochs, rows["vcl"].batch_size, rows["vcl"].settings["lr"]) == (800, 1024, 5e-3)
    assert rows["ewc"].tasks.strength == 100.0
    for row in found.rows:
        if row.name == "vcl":
            assert row.cpu.epochs == 8 * found.rows[0].cpu.epochs


def test_names_are_checked(tmp_path):
    with pytest.raises(InvalidValue, match="permuted-mnist"):
        recipe("permuted-mnst")
    with pytest.raises(InvalidValue, match="vogn"):
        run(RECIPES["permuted-mnist"], only=["vgn"], out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": {"kind": "rotated"}}, "tasks.kind"),
        ({"tasks": {"count": 0}}, "tasks.count"),
        ({"tasks": {"start": "zero"}}, "tasks.start"),
        ({"tasks": {"hold": 1.0}}, "tasks.hold"),
        ({"tasks": {"last_lr": 0.0}}, "tasks.last_lr"),
        ({"tasks": {"strength": -1.0}}, "tasks.strength"),
        ({"tasks": {"online": 2.0}}, "tasks.online"),
        ({"tasks": {"kind": "split"}, "model": "lenet5", "model_options": {}}, "model='mlp'"),
        ({"milestones": (1,)}, "milestones"),
        ({"augment": True}, "augment"),
        ({"method": "sgd"}, "sgd"),
        ({"settings": {"lrr": 0.1}}, "lrr"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_stream_is_refused_before_it_begins(changes, words, tmp_path):
    """What a stream does not have is not passed over in silence."""
    training = row_of(RECIPES["permuted-mnist"], "adam").cpu
    check_training(training)
    tasks = replace(training.tasks, **changes.get("tasks", {}))
    with pytest.raises(InvalidValue, match=words):
        train(replace(training, **{**changes, "tasks": tasks}), 0, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_for_single_tasks_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="is a stream of tasks"):
        run(RECIPES["permuted-mnist"], only=["adam"], overrides={"epochs": 1}, out=tmp_path)
    with pytest.raises(InvalidValue, match="is a stream of tasks"):
        run(RECIPES["permuted-mnist"], only=["adam"], ensemble=2, out=tmp_path)


def test_a_queue_takes_streams(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, "permuted-mnist", tiny(RECIPES["permuted-mnist"]))
    (tmp_path / "queue.toml").write_text(
        '[[runs]]\nrecipe = "permuted-mnist"\nrow = "adam"\nseeds = [0, 1]\n'
    )
    facts = {"out": str(tmp_path / "runs"), "results": str(tmp_path / "kept"), "data": None, "device": "cpu"}
    for job in load_queue(tmp_path / "queue.toml"):
        for _ in range(2):  # the second time it has finished
            work(job_of(job.facts()), facts, Orders())
        status = status_of(job.folder(tmp_path / "runs"))
        assert (status.state, status.step, status.steps) == ("finished", 12, 12)
        assert read_record(job.record(tmp_path / "kept"))[-1]["as_trained"]["average_accuracy"] > 0
    changed = '[[runs]]\nrecipe = "permuted-mnist"\nrow = "adam"\nseed = 0\nsettings = { epochs = 1 }\n'
    (tmp_path / "queue.toml").write_text(changed)
    with pytest.raises(InvalidValue, match="stream of tasks"):
        load_queue(tmp_path / "queue.toml")


def test_stored_runs_keep_their_form(tmp_path):
    """What other versions wrote is read: the names in course.json and in a checkpoint do not change."""
    found = tiny(RECIPES["split-mnist"])
    stored = run_row(found, row_of(found, "vogn"), 0, tmp_path)
    of_all = ("format", "recipe", "row", "size", "seed", "tasks", "training", "matrix", "seconds", "commit")
    assert {*of_all} < stored.keys()
    assert list(json.loads(json.dumps(stored["training"]))) == sorted(
        [
            "method",
            "epochs",
            "batch_size",
            "settings",
            "start",
            "hold",
            "last_lr",
            "samples",
            "strength",
            "online",
        ]
    )
    assert stored["tasks"] == 2
    assert not (run_path(tmp_path, found.name, "cpu", "vogn", 0) / "config.json").exists()
