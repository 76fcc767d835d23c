"""Recipes of continual learning on data of a few pixels: every row, stopping and going on, the table and the figure."""

import signal
from dataclasses import replace

import pytest
import torch

from credo.continual import MultiHead
from credo.data import Examples, Splits
from credo.errors import InvalidValue
from credo.experiments import continual, streams
from credo.experiments.continual_learners import learner_for
from credo.experiments.continual_recipe import ContinualRecipe
from credo.experiments.continual_report import write_report
from credo.experiments.continual_runs import CONTINUAL, continual_recipe_of, run_stream
from credo.experiments.stopping import StopRequest, Terminated

RECIPES = list(CONTINUAL.values())


def splits(classes: int = 4, n: int = 80) -> Splits:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(n) % classes
    centres = torch.randint(0, 200, (classes, 1, 4, 4), generator=generator)
    images = (centres[targets] + torch.randint(0, 50, (n, 1, 4, 4), generator=generator)).to(torch.uint8)
    train, test = (Examples(images[rows], targets[rows]) for rows in (slice(0, 60), slice(60, n)))
    return Splits("tiny", train, test)


def tiny(recipe: ContinualRecipe) -> ContinualRecipe:
    """The recipe with its own methods and settings, at a size for tests."""
    rows = tuple(
        replace(row, cpu=replace(row.cpu, epochs=2, batch_size=20, samples=3)) for row in recipe.rows
    )
    return replace(recipe, tasks={"paper": 2, "cpu": 2}, hidden=(5, 4), rows=rows)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_row_runs_and_the_report_has_them_all(recipe, tmp_path):
    small, results = tiny(recipe), {}
    for row in small.rows:
        results[row.name] = [continual.run(small, row, "cpu", seed, splits(), tmp_path) for seed in (0, 1)]
    text = write_report(small, "cpu", results, tmp_path)
    assert text.count("\n") == 2 + len(small.rows)
    assert all(f"| {label} |" in text for label in ("VOGN", "VCL", "EWC", "Adam"))
    assert (tmp_path / "average-accuracy.png").stat().st_size > 10_000
    for found in results.values():
        assert [len(row) for row in found[0]["matrix"]] == [1, 2]
        assert found[0]["average_accuracy"] == pytest.approx(sum(found[0]["matrix"][1]) / 2)


@pytest.mark.parametrize("name", ["vogn", "vcl", "ewc", "joint"])
@pytest.mark.parametrize("after", [1, 5, 7])  # of 12 steps
def test_a_run_that_was_stopped_goes_on(name, after, tmp_path, monkeypatch):
    recipe = tiny(CONTINUAL["permuted-mnist"])
    row = next(row for row in recipe.rows if row.name == name)
    whole = continual.run(recipe, row, "cpu", 0, splits(), tmp_path / "whole")
    steps = 0

    def asked(request):
        nonlocal steps
        steps += 1
        return signal.SIGTERM if steps == after else None

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "signal", property(asked, lambda request, value: None), raising=False)
        with pytest.raises(Terminated):
            continual.run(recipe, row, "cpu", 0, splits(), tmp_path / "cut")
    again = continual.run(recipe, row, "cpu", 0, splits(), tmp_path / "cut")
    assert again["matrix"] == whole["matrix"]


def test_a_finished_run_is_read_and_another_is_refused(tmp_path):
    recipe = tiny(CONTINUAL["permuted-mnist"])
    adam = next(row for row in recipe.rows if row.name == "adam")
    first = continual.run(recipe, adam, "cpu", 0, splits(), tmp_path)
    assert continual.run(recipe, adam, "cpu", 0, splits(), tmp_path) == first
    other = replace(adam, cpu=replace(adam.cpu, epochs=3))
    with pytest.raises(InvalidValue, match="another run: training"):
        continual.run(recipe, other, "cpu", 0, splits(), tmp_path)


def test_permuted_tasks():
    first, second = streams.permuted(splits(), 2, seed=3)
    x, y = first.batch(torch.arange(5))
    permuted, same = second.batch(torch.arange(5))
    assert torch.equal(x, splits().train.inputs[:5].flatten(1) / 255)
    assert torch.equal(y, same)
    assert not torch.equal(x, permuted)
    assert torch.equal(x.sort(1).values, permuted.sort(1).values)
    assert not torch.equal(permuted, streams.permuted(splits(), 2, seed=4)[1].batch(torch.arange(5))[0])


def test_split_tasks():
    tasks = streams.split(splits(), 2)
    assert [task.head for task in tasks] == ["head_0", "head_1"]
    assert all(set(task.targets.tolist()) == {0, 1} for task in tasks)
    assert sum(len(task) for task in tasks) == 60
    with pytest.raises(InvalidValue, match="tasks=3"):
        streams.split(splits(), 3)
    assert isinstance(continual.model_of(CONTINUAL["split-mnist"], tasks), MultiHead)


@pytest.mark.parametrize("name", ["vogn", "vcl"])
def test_heads_that_arrive_later_have_the_prior_of_the_first(name, tmp_path):
    """The first head's is the optimiser's `prior_precision`; the second's comes by way of the learner."""
    recipe = tiny(CONTINUAL["split-mnist"])
    training = next(row.cpu for row in recipe.rows if row.name == name)
    training = replace(training, settings={**training.settings, "prior_precision": 7.0})
    tasks = streams.split(splits(), 2)
    learner = learner_for(training, continual.model_of(recipe, tasks), seed=0)
    first = learner.begin(tasks[0])
    learner.step(*first.batch(torch.arange(20)))
    learner.finish(first)
    learner.begin(tasks[1])
    optimizer = learner._optimizer
    head = dict(learner.model.named_parameters())["heads.head_1.weight"]
    torch.testing.assert_close(optimizer.state[head]["prior_precision"], torch.full_like(head, 7.0))


def test_the_papers_settings():
    recipe = CONTINUAL["permuted-mnist"]
    rows = {row.name: row.paper for row in recipe.rows}
    assert (recipe.tasks["paper"], recipe.seeds["paper"], recipe.hidden) == (10, 20, (100, 100))
    vogn = rows["vogn"]
    assert (vogn.epochs, vogn.batch_size, vogn.samples, vogn.start, vogn.last_lr) == (
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
    assert rows["ewc"].strength == 100.0
    for row in recipe.rows:
        if row.name == "vcl":
            assert row.cpu.epochs == 8 * recipe.rows[0].cpu.epochs


def test_names_are_checked(tmp_path):
    with pytest.raises(InvalidValue, match="permuted-mnist"):
        continual_recipe_of("permuted-mnst")
    with pytest.raises(InvalidValue, match="vogn"):
        run_stream(CONTINUAL["permuted-mnist"], only=["vgn"], out=tmp_path)
