"""docs/results.md against its records: every cell recomputed slowly from the JSON, and the page in the repository."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from credo.errors import IntegrityError, InvalidValue
from credo.experiments.records import record_path, write_record
from credo.experiments.report import load_records, results_page, write_page
from credo.experiments.report.results_page import groups
from tests.experiments.synthetic import write_run

ROOT = Path(__file__).parents[2]
ROWS = ("adam", "vogn-defaults", "mc-dropout")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of three rows, one of them with unfamiliar data."""
    folder = tmp_path_factory.mktemp("page")
    for row in ROWS:
        for seed in (0, 1):
            result = write_run(folder / "runs", row, seed=seed, size="paper", ood=("svhn",))
            write_record(
                result.folder, record_path(folder / "results", result.recipe, result.size, row, seed)
            )
    return folder / "results"


def page_of(records: Path) -> str:
    write_page(records, records.parent / "docs" / "results.md")
    return (records.parent / "docs" / "results.md").read_text()


def cells(page: str, title: str) -> dict[str, dict[str, str]]:
    """Our lines of the first table below that heading, by method and column."""
    lines = page.partition(f"## {title}")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    head = rows[0]
    return {row[0].strip(): dict(zip(head, row, strict=True)) for row in rows[2:] if "credo" in row[1]}


def finals(records: Path, row: str) -> list[dict[str, dict[str, float]]]:
    found = []
    for path in sorted(records.glob(f"*/paper/{row}-seed-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.append(next(line for line in lines if line["kind"] == "final"))
    return found


def written(values: list[float], digits: int, factor: float = 1.0) -> str:
    mean, sd = factor * statistics.fmean(values), factor * statistics.stdev(values)
    return f"{mean:.{digits}f} ± {sd:.{digits}f}"


@pytest.mark.parametrize(
    ("row", "name"), list(zip(ROWS, ("Adam", "VOGN (defaults)", "MC-dropout"), strict=True))
)
def test_every_cell_is_the_mean_over_its_records(records: Path, row: str, name: str) -> None:
    line = {
        head: cell.strip("*") for head, cell in cells(page_of(records), "LeNet-5 on CIFAR-10")[name].items()
    }
    trained = [final["as_trained"] for final in finals(records, row)]
    after = [final["after_temperature"] for final in finals(records, row)]
    assert line["accuracy %"] == written([one["accuracy"] for one in trained], 2, 100)
    assert line["NLL"] == written([one["nll"] for one in trained], 3)
    assert line["ECE"] == written([one["ece"] for one in trained], 3)
    assert line["NLL, T fitted"] == written([one["nll"] for one in after], 3)
    assert line["ECE, T fitted"] == written([one["ece"] for one in after], 3)
    assert line["OOD AUROC"] == written([one["ood_auroc.svhn"] for one in trained], 3)
    temperatures = [statistics.fmean(final["temperatures"]) for final in finals(records, row)]
    assert line["T"] == written(temperatures, 2)


def test_every_record_is_named_and_there(records: Path) -> None:
    page = page_of(records)
    named = [
        Path(folder) / f"{stem}.jsonl"
        for folder, stems in re.findall(r"`(results/[^`]*/)`: (.*?)[;.]\n", page)
        for stem in re.findall(r"`([^`]*)`", stems)
    ]
    assert sorted(named) == sorted(path.relative_to(records.parent) for path in records.rglob("*.jsonl"))


def test_the_same_records_give_the_same_bytes(records: Path, tmp_path: Path) -> None:
    first, second = (write_page(records, tmp_path / name / "results.md") for name in ("a", "b"))
    assert [path.name for path in first] == [path.name for path in second]
    assert len(first) > 1
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    for picture in re.findall(r"\]\((figures/[^)]*)\)", first[0].read_text()):
        assert (tmp_path / "a" / picture).exists()


def test_a_figure_without_records_is_removed(records: Path, tmp_path: Path) -> None:
    old = tmp_path / "figures" / "results" / "gone-cpu-training_curves.svg"
    old.parent.mkdir(parents=True)
    old.write_text("<svg/>")
    write_page(records, tmp_path / "results.md")
    assert not old.exists()


def test_what_vogn_loses_comes_first(tmp_path: Path) -> None:
    """VOGN's NLL is 2 % above Adam's, its accuracy within half a point: one line, and only of the NLL."""
    scores = {"adam": (0.700, 1.00), "vogn-defaults": (0.698, 1.02), "mc-dropout": (0.6, 1.5)}
    for row, (accuracy, nll) in scores.items():
        place = tmp_path / "results" / "table1-lenet5" / "paper" / f"{row}-seed-0.jsonl"
        write_record(write_run(tmp_path / "runs", row, size="paper").folder, place)
        lines = [json.loads(line) for line in place.read_text().splitlines()]
        final = next(line for line in lines if line["kind"] == "final")
        final["as_trained"] |= {"accuracy": accuracy, "nll": nll, "ece": 0.1}
        final["after_temperature"] |= {"nll": 1.0, "ece": 0.1}
        place.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = results_page(load_records(tmp_path / "results"), tmp_path / "results", set())
    told = page.partition("## Where VOGN loses")[2].partition("\n## ")[0]
    assert page.index("## Where VOGN loses") == page.index("## ")
    losses = [line for line in told.splitlines() if "](#" in line]
    assert len(losses) == 1
    assert "NLL | 1.020 | Adam 1.000 | 0.020 |" in losses[0]
    anchor = re.search(r"\(#([^)]*)\)", losses[0])
    assert anchor is not None
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    slugs = ["".join(c for c in h.lower() if c.isalnum() or c in " -_").replace(" ", "-") for h in headings]
    assert anchor.group(1) in slugs


def test_lists_say_what_is_still_to_come(records: Path, tmp_path: Path) -> None:
    queue = records / "mine.toml"
    queue.write_text(
        '[[runs]]\nrecipe = "table1-lenet5"\nrows = ["adam", "bbb"]\nseeds = [0, 1]\nsize = "paper"\n'
    )
    try:
        page = results_page(load_records(records), records, set())
    finally:
        queue.unlink()
    assert "| `results/mine.toml` | table1-lenet5 | paper | 2 of 4 |" in page


def test_a_record_in_the_wrong_place_or_cut_off_is_an_error(records: Path, tmp_path: Path) -> None:
    source = next(records.rglob("adam-seed-0.jsonl"))
    for name in ("adam-seed-3.jsonl", "sgd-seed-0.jsonl"):
        place = tmp_path / name / "table1-lenet5" / "paper" / name
        place.parent.mkdir(parents=True)
        place.write_bytes(source.read_bytes())
        with pytest.raises(InvalidValue, match="must lie where its run says"):
            load_records(tmp_path / name)
    cut = tmp_path / "cut" / "table1-lenet5" / "paper" / "adam-seed-0.jsonl"
    cut.parent.mkdir(parents=True)
    cut.write_text(source.read_text().splitlines()[0])
    with pytest.raises(IntegrityError, match="cut off"):
        load_records(tmp_path / "cut")
    with pytest.raises(InvalidValue, match="holds no record"):
        write_page(tmp_path / "nothing", tmp_path / "results.md")


def test_uci_is_a_table_of_data_sets(tmp_path: Path) -> None:
    rmse = {"yacht": [0.5, 0.7, 0.9], "energy": [1.0]}
    for name, values in rmse.items():
        for split, value in enumerate(values):
            for row, factor in (("adam", 2.0), ("vogn", 1.0)):
                label = f"{row}+data=uci.{name}.{split}"
                lines = [
                    {
                        "kind": "run",
                        "format": 1,
                        "recipe": "uci",
                        "row": label,
                        "size": "cpu",
                        "seed": 0,
                        "training": {"data": f"uci:{name}:{split}", "task": "regression", "method": row},
                    },
                    {
                        "kind": "final",
                        "as_trained": {"rmse": factor * value, "nll": 9.0},
                        "after_noise": {"rmse": factor * value, "nll": factor + split},
                    },
                ]
                place = record_path(tmp_path / "results", "uci", "cpu", label, 0)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = results_page(load_records(tmp_path / "results"), tmp_path / "results", set())
    error = statistics.stdev(rmse["yacht"]) / math.sqrt(3)
    assert f"| yacht | 1.40 ± {2 * error:.2f} (3) | **0.70 ± {error:.2f}** (3) | 1.02 | 0.67 | 1.58 |" in page
    assert "| energy | 2.00 (1) | **1.00** (1) | 1.80 | 0.54 | 2.09 |" in page
    assert "| yacht | 3.00 ± 0.58 (3) | **2.00 ± 0.58** (3) | 1.63 | 1.25 | 1.18 | 2.01 |" in page


def test_streams_of_tasks_have_a_table_and_a_figure(tmp_path: Path) -> None:
    """Their records have no curves: the figure is made from the matrix of accuracies."""
    for row, matrix in (("vogn", [[0.99], [0.97, 0.95]]), ("ewc", [[0.98], [0.90, 0.96]])):
        path = record_path(tmp_path / "results", "split-mnist", "cpu", row, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        scores = {
            "average_accuracy": sum(matrix[-1]) / 2,
            "forgetting": matrix[0][0] - matrix[1][0],
            "backward_transfer": matrix[1][0] - matrix[0][0],
            "seconds": 2.0,
            "epochs_per_task": 5,
        }
        head = {
            "kind": "run",
            "format": 1,
            "recipe": "split-mnist",
            "row": row,
            "size": "cpu",
            "seed": 0,
            "training": {"method": row, "tasks": 2, "epochs": 5},
            "commit": "0" * 40,
            "machine": {},
        }
        lines = [head, {"kind": "final", "as_trained": scores, "matrix": matrix}]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    page = (tmp_path / "docs" / "results.md").read_text()
    found = cells(page, "Continual learning: Split MNIST")
    assert found["VOGN"]["average accuracy %"].strip("*") == "96.0"
    assert found["EWC"]["average accuracy %"] == "93.0"
    pictures = re.findall(r"\]\((figures/results/split-mnist[^)]*)\)", page)
    assert pictures
    assert all((tmp_path / "docs" / picture).exists() for picture in pictures)
    assert load_records(tmp_path / "results")[1].facts["average_accuracies"] == pytest.approx([0.99, 0.96])


def test_the_page_in_the_repository_is_what_its_records_give() -> None:
    found = load_records(ROOT / "results")
    if not found:
        pytest.skip("no record is stored")
    page = (ROOT / "docs" / "results.md").read_text()
    pictures = set(re.findall(r"\]\(figures/results/([^)]*)\)", page))
    assert page == results_page(found, ROOT / "results", pictures), "run: credo report results --docs"
    assert pictures == {path.name for path in (ROOT / "docs" / "figures" / "results").glob("*.svg")}
    assert len(groups(found)) == page.count("\nRecords: ")
