"""Every example runs as a reader would run it, is short, and does what it says."""

import re
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 80


def test_two_moons(tmp_path, capsys):
    from examples import two_moons

    two_moons.main(str(tmp_path / "moons.png"), steps=1000)
    out = capsys.readouterr().out
    accuracy, near, near_information, far, far_information = map(float, re.findall(r"\d\.\d+", out)[:5])
    assert accuracy > 0.97
    assert 0 <= near < far <= 0.7
    assert far_information > 2 * near_information
    assert (tmp_path / "moons.png").stat().st_size > 10_000


def test_regression(tmp_path, capsys):
    from examples import regression

    regression.main(str(tmp_path / "band.png"), steps=1000)
    among_data, outside = map(float, re.findall(r"\d\.\d+", capsys.readouterr().out)[:2])
    assert outside > 2 * among_data
    assert (tmp_path / "band.png").stat().st_size > 10_000


def test_digits(capsys):
    from examples import digits

    digits.main(epochs=10)
    rows = {
        line.split()[0]: list(map(float, line.split()[1:]))
        for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert rows.keys() == {"Adam", "VOGN"}
    assert rows["VOGN"][0] > rows["Adam"][0] - 0.02


def test_own_model(tmp_path, capsys):
    from examples import own_model

    state = torch.get_rng_state()
    try:
        assert own_model.main(str(tmp_path / "q.safetensors"), epochs=40)["accuracy"] > 0.9
    finally:
        torch.set_rng_state(state)
    right, wrong = map(float, re.findall(r"answers: (\d\.\d+)", capsys.readouterr().out))
    assert right < wrong


def test_continual_digits(capsys):
    from examples import continual_digits

    continual_digits.main(tasks=2, epochs=15)
    adam, vogn = capsys.readouterr().out.splitlines()
    after_both = [float(re.findall(r"\d\.\d+", line)[1]) for line in (adam, vogn)]
    assert after_both[1] > 0.85
    assert after_both[1] > after_both[0]


def test_tabular(capsys):
    pytest.importorskip("sklearn", reason="extra: sklearn")
    pytest.importorskip("pandas", reason="extra: sklearn")
    from examples import tabular

    assert tabular.main(max_iter=30) > 0.8
    assert "epistemic" in capsys.readouterr().out


def test_language_model(capsys):
    pytest.importorskip("transformers", reason="extra: hf")
    pytest.importorskip("peft", reason="extra: hf")
    from examples import language_model

    with torch.random.fork_rng():
        familiar, unfamiliar = language_model.main(epochs=8)
    assert familiar > 0
    assert unfamiliar > 0
    assert "weights have a posterior" in capsys.readouterr().out


def test_lightning_trains_an_unmodified_module():
    from examples import lightning_module

    state = torch.get_rng_state()
    try:
        assert lightning_module.main(epochs=5) > 0.85
    finally:
        torch.set_rng_state(state)
