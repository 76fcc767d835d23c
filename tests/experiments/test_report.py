"""The report: numbers over seeds against the slow formula, names that stay text, a page that needs nothing else."""

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from credo.errors import CredoError
from credo.experiments import report
from credo.experiments.names import label
from credo.experiments.page_style import SORT_SCRIPT
from credo.experiments.report.tables import (
    MEASURES,
    OURS,
    PUBLISHED,
    Cell,
    Line,
    Table,
    aggregate,
    cell,
    measures_of,
)
from credo.experiments.results import Result, load_results
from tests.experiments.synthetic import write_run

EVIL = "<script>alert('x')</script>|*a*_b_\n# [link](http://evil)"


@pytest.fixture
def three_seeds(tmp_path: Path) -> list[Result]:
    for seed, accuracy in enumerate((0.60, 0.62, 0.67)):
        write_run(tmp_path, "vogn", seed=seed, metrics={"accuracy": accuracy, "nll": 1.1})
    write_run(tmp_path, "adam", metrics={"accuracy": 0.61, "nll": 1.3})
    return load_results(tmp_path)


def line_of(table: Table, row: str, who: str) -> Line:
    return next(line for line in table.lines if (line.row, line.who) == (row, who))


def printed(tables: list[Table], width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    report.terminal(console, tables)
    return console.file.getvalue()  # type: ignore[attr-defined]


# Numbers


def test_mean_and_sd_are_those_of_the_seeds() -> None:
    found = aggregate([{"nll": x, "only": 1.0} if x < 3 else {"nll": x} for x in (1.0, 2.0, 4.5)])
    assert set(found) == {"nll"}  # a metric that a seed lacks has no mean over seeds
    assert found["nll"].mean == pytest.approx(2.5)
    assert found["nll"].sd == pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 2.0**2) / 2))


def test_a_single_seed_has_no_sd() -> None:
    assert cell([0.25]) == Cell(0.25, None)


def test_what_is_undefined_in_one_seed_is_undefined() -> None:
    found = cell([0.9, math.nan])
    assert math.isnan(found.mean)
    assert MEASURES[1].text(found.mean, found.sd) == "–"
    assert cell([1.0, math.inf]).mean == math.inf


@pytest.mark.parametrize(
    ("key", "mean", "sd", "text"),
    [
        ("epochs", 10.0, 0.0, "10"),  # a count has no spread
        ("accuracy", 0.6732, 0.0131, "67.32 ± 1.31"),
        ("nll", 0.938, None, "0.938"),
        ("epochs", 210, None, "210"),
        ("seconds_per_epoch", 18.33, 0.0, "18.33 ± 0.00"),
        ("nll", math.inf, math.nan, "inf"),
    ],
)
def test_numbers_are_written_as_in_the_paper(key: str, mean: float, sd: float | None, text: str) -> None:
    assert measures_of([key])[0].text(mean, sd) == text


def test_ours_stand_beside_the_published(three_seeds: list[Result]) -> None:
    (table,) = report.tables(three_seeds)
    ours, published = line_of(table, "vogn", OURS), line_of(table, "vogn", PUBLISHED)
    assert ours.remark == "3 seeds"
    assert ours.cells["accuracy"].mean == pytest.approx(0.63)
    assert ours.cells["accuracy"].sd == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2))
    assert (published.cells["accuracy"].mean, published.cells["accuracy"].sd) == (0.6732, 0.0131)
    assert line_of(table, "adam", OURS).remark == "1 seed"
    text = printed([table])
    for expected in ("63.00 ± 3.61", "67.32 ± 1.31", "3 seeds", "paper", "CPU size"):
        assert expected in text


def test_rows_that_were_not_run_are_said_to_be(three_seeds: list[Result]) -> None:
    (table,) = report.tables(three_seeds)
    assert line_of(table, "mc-dropout", OURS).remark == "not run"
    assert line_of(table, "mc-dropout", OURS).cells == {}
    assert "vogn-released" not in {line.row for line in table.lines}  # no such row at CPU size


def test_the_best_of_ours_is_marked_and_never_the_papers(three_seeds: list[Result]) -> None:
    (table,) = report.tables(three_seeds)
    best = {(line.row, line.who, key) for line in table.lines for key, c in line.cells.items() if c.best}
    assert {("vogn", OURS, "accuracy"), ("vogn", OURS, "nll")} <= best
    assert all(who == OURS for _, who, _ in best)
    assert not {key for _, _, key in best} & {"epochs", "seconds_per_epoch", "train_accuracy"}
    assert "**63.00 ± 3.61**" in report.markdown([table])


def test_equal_numbers_share_the_mark(tmp_path: Path) -> None:
    for row in ("adam", "vogn"):
        write_run(tmp_path, row, metrics={"ece": 0.0201 if row == "adam" else 0.0204})
    (table,) = report.tables(load_results(tmp_path))
    assert all(line_of(table, row, OURS).cells["ece"].best for row in ("adam", "vogn"))  # both read 0.020


def test_recipes_and_sizes_have_tables_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, "vogn")
    write_run(tmp_path, "vogn", size="paper")
    write_run(tmp_path, "mine", recipe="my-own")
    tables = report.tables(load_results(tmp_path))
    assert {(t.recipe, t.size) for t in tables} == {
        ("table1-lenet5", "cpu"),
        ("table1-lenet5", "paper"),
        ("my-own", "cpu"),
    }
    own = next(t for t in tables if t.recipe == "my-own")
    assert [line.who for line in own.lines] == [OURS]  # nothing is published of it
    assert not any("paper's" in note for note in own.notes)


def test_unfamiliar_data_have_columns(tmp_path: Path) -> None:
    write_run(tmp_path, "vogn", recipe="mine", ood=("svhn", "held_out"), metrics={"ood_auroc.svhn": 0.875})
    (table,) = report.tables(load_results(tmp_path))
    headings = [measure.heading for measure in table.measures]
    assert {"OOD AUROC SVHN", "OOD FPR95 held-out classes"} <= set(headings)
    assert "0.875" in printed([table])


def test_gaps_are_shown_where_the_paper_gives_them(tmp_path: Path) -> None:
    numbers = {"train_accuracy": 0.7, "accuracy": 0.6, "train_nll": 0.9, "nll": 1.2}
    write_run(tmp_path, "dropout-0.1", recipe="figure12-dropout-lenet5", metrics=numbers)
    (table,) = report.tables(load_results(tmp_path))
    cells = line_of(table, "dropout-0.1", OURS).cells
    assert cells["accuracy_gap"].mean == pytest.approx(0.1)
    assert cells["nll_gap"].mean == pytest.approx(0.3)
    assert {"accuracy_gap", "nll_gap"} <= {measure.key for measure in table.measures}


def test_labels() -> None:
    assert label("mc-dropout") == "MC-dropout"
    assert label("prior-variance-7.5e-4") == "prior variance 7.5e-4"
    assert label("my_row") == "my row"


# Text


class Page(HTMLParser):
    """Every tag and attribute, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def evil_table() -> Table:
    line = Line("r", EVIL, OURS, {"nll": Cell(1.0)}, EVIL)
    return Table(EVIL, "cpu", EVIL, EVIL, measures_of(["nll"]), (line,), (EVIL,), ((EVIL, EVIL),), EVIL)


def test_names_stay_text_in_html() -> None:
    page = Page(report.html([evil_table()], title=EVIL))
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("script") == 1  # ours, which sorts
    assert SORT_SCRIPT in page.texts
    assert any(EVIL.split("|")[0] in text for text in page.texts)


def test_names_stay_text_in_markdown() -> None:
    text = report.markdown([evil_table()])
    assert "<script>" not in text
    assert not re.search(r"(?<!\\)\[link", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3  # no name breaks a line
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}  # nor adds a column


def test_names_stay_text_in_the_terminal() -> None:
    table = Table("r", "cpu", "[bold red]x[/]", "", measures_of(["nll"]), (Line("r", "[b]y", OURS, {}),))
    assert "[bold red]x[/]" in printed([table])
    assert "[b]y" in printed([table])


def test_a_narrow_terminal_keeps_every_number(three_seeds: list[Result]) -> None:
    text = printed(report.tables(three_seeds), width=90)
    for expected in ("63.00", "±3.61", "MC-dropout"):
        assert expected in text
    assert "…" not in text


# Files


def test_the_page_needs_nothing_else(three_seeds: list[Result], tmp_path: Path) -> None:
    written = report.write(tmp_path / "out", three_seeds)
    page = Page((tmp_path / "out" / "report.html").read_text())
    links = [value or "" for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert links
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in links)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object"})
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{}]
    assert "url(" not in (tmp_path / "out" / "report.html").read_text()
    assert "prefers-color-scheme: dark" in "".join(page.texts)
    anchors = {attrs["id"] for tag, attrs in page.tags if tag == "section"}
    assert {f"#{anchor}" for anchor in anchors} == {link for link in links if link.startswith("#")}
    assert all(path.stat().st_size > 0 for path in written)
    assert [path.name for path in written[:2]] == ["report.html", "report.md"]
    assert {path.suffix for path in written[2:]} == {".png", ".svg"}


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    results = [write_run(tmp_path, "vogn", recipe="figure3-momentum-batchnorm")]  # one figure
    first, second = (report.write(tmp_path / name, results) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_no_results_make_an_empty_report(tmp_path: Path) -> None:
    assert report.tables([]) == []
    assert len(report.write(tmp_path / "out", [])) == 2


def test_a_recipe_name_with_path_parts_writes_nothing(tmp_path: Path) -> None:
    result = write_run(tmp_path / "runs", "vogn")
    config = json.loads((result.folder / "config.json").read_text())
    config["name"]["recipe"] = "../../escaped"
    (result.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CredoError, match="path parts"):
        report.write(tmp_path / "out", load_results(tmp_path / "runs"))
    assert not (tmp_path / "out").exists()
