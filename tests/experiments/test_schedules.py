"""The learning rate by its formula, at every step."""

from pathlib import Path

import pytest

from credo.experiments.build import LearningRate
from credo.experiments.train import train
from credo.experiments.watchers import ProgressBar, TensorBoard
from tests.experiments.small import VOGN


def test_a_constant_rate() -> None:
    assert {LearningRate(0.1, 0.0, 0.0, (), 0.1).at(step) for step in range(9)} == {0.1}


def test_gradual_warm_up_is_linear_and_milestones_decay() -> None:
    rate = LearningRate(peak=1.0, start=0.2, warmup=4.0, milestones=(6, 8), decay=0.5)
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert [rate.at(step) for step in range(10)] == pytest.approx(expected)


def test_a_milestone_inside_the_warm_up() -> None:
    rate = LearningRate(peak=1.0, start=0.0, warmup=4.0, milestones=(2,), decay=0.1)
    assert [rate.at(step) for step in range(5)] == pytest.approx([0.0, 0.25, 0.05, 0.075, 0.1])


def test_the_progress_bar_shows_rates_and_scores(tmp_path: Path) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(record=True, force_terminal=True, width=140, file=(tmp_path / "out").open("w"))
    train(VOGN, 0, tmp_path / "run", watcher=ProgressBar(console))
    text = console.export_text()
    assert "VOGN, seed 0" in text
    assert "epoch 3/3" in text
    assert "steps/s" in text
    assert "accuracy" in text


def test_tensorboard_gets_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(VOGN, 0, tmp_path / "run", watcher=TensorBoard(tmp_path / "board"))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    curve = events.Scalars("nll")
    assert [event.step for event in curve] == [1, 2, 3]
    assert [event.value for event in curve] == pytest.approx([row["nll"] for row in result.log])
