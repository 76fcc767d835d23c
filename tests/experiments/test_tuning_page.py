"""The page of a search: one file that needs nothing else, with every trial and optuna's plots."""

import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from credo.errors import InvalidValue
from credo.experiments.tuning import outcome
from credo.experiments.tuning.outcome import PLOTS, page
from tests.experiments.tuned import quick

pytest.importorskip("optuna")


class Reader(HTMLParser):
    """Tags with their attributes, and the text of the table's cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "td":
            self.cells[-1] += data.strip()


def test_the_page_stands_alone_and_shows_everything(tmp_path: Path) -> None:
    found = quick(tmp_path, trials=6)
    text = (found.folder / "tuning.html").read_text()
    reader = Reader(text)
    addresses = [
        a for _, attributes in reader.tags for name, a in attributes.items() if name in ("src", "href")
    ]
    assert addresses == []
    assert "@import" not in text.split("<script>")[0]
    assert unescape(text).count(found.constructor) == 1
    numbers = [cell for k, cell in enumerate(reader.cells) if k % 7 == 0]
    assert sorted(numbers) == [str(k) for k in range(6)]
    assert f"{found.best.nll:.4f}" in reader.cells[1]
    drawn = [attributes.get("id") for tag, attributes in reader.tags if tag == "div"]
    assert {name.removeprefix("plot_") for name, *_ in PLOTS} <= set(drawn)
    assert len(re.findall(r"Plotly\.newPlot\(", text.split("<h1>")[1])) == len(PLOTS)


def test_the_page_of_a_single_trial_leaves_out_what_cannot_be_drawn(tmp_path: Path) -> None:
    found = quick(tmp_path, trials=1)
    text = page(found, "<b>title</b>")
    assert "<b>" not in text.split("<h1>")[1]
    assert "optimization_history" in text.split("<h1>")[1]
    assert "param_importances" not in text.split("<h1>")[1]


def test_a_search_without_optuna_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InvalidValue, match=r"tuning needs optuna, .*pip install 'credo\[tune\]'"):
        quick(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_progress_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr(outcome, "page", lambda *_: "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    if kind == "lines":
        monkeypatch.setitem(sys.modules, "rich", None)
    found = quick(tmp_path, trials=2, progress=True)
    told = capsys.readouterr().err
    assert f"best NLL {found.best.nll:.4f}, defaults {found.defaults.nll:.4f}" in told
    assert ("2/2 trials" in told) == (kind == "bars")
    assert ("trial 1: " in told) == (kind == "lines")


def test_the_extra_for_tuning_is_enough() -> None:
    """Without what the command line and the reports are built with."""
    blocked = ("rich", "tyro", "matplotlib", "tensorboard", "PIL")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import credo; credo.tune"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
