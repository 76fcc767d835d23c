"""docs/results.md: one page and its figures, made of the records below `results/` and of nothing else.

    write_page("results", "docs/results.md")       # `credo report results --docs`

The same records give the same bytes. Every table names the files that its numbers come from.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from credo.errors import InvalidValue
from credo.experiments import figures
from credo.experiments.names import label, plain_name
from credo.experiments.queue_file import load_queue
from credo.experiments.recipes import RECIPES
from credo.experiments.recipes.published import UCI as UCI_PUBLISHED
from credo.experiments.report.render import escape, line_of
from credo.experiments.report.render import section as table_section
from credo.experiments.report.stored import StoredResult, load_records
from credo.experiments.report.tables import Cell, Measure, aggregate, cell, measures_of, tables
from credo.posterior.files import write_atomically

REGRESSION: Final = "uci"  # a recipe of one row for each data set and split: a table of its own
FIGURES: Final = ("training_curves", "calibration_curves", "sensitivity", "average_accuracy")
HEAD: Final = """\
# Results

This page is generated from the records in `results/`: do not edit it.

    credo report results --docs

A record is made by `credo queue` ([queue.md](queue.md)). It holds the settings, the commit, the machine, every epoch
and the final scores of one run.

- A cell is the mean over seeds, ± the standard deviation where there are several. **Bold** is the best of our means.
  Lines marked *paper* are published numbers; what differs from their set-up stands below the table.
- "T fitted" is after temperature scaling: one number, fitted on validation data, or for each tenth of the test data on
  the other nine. Every method gets it.
- Low is good for NLL, Brier, ECE and FPR95, high for accuracy and AUROC.
- Seconds are those of a machine that did other work too. They do not compare.
"""


@dataclass(frozen=True)
class Group:
    """The records of one recipe and size."""

    recipe: str
    size: str
    results: tuple[StoredResult, ...]

    @property
    def name(self) -> str:
        return plain_name("recipe and size", f"{self.recipe}-{self.size}")


def write_page(results: str | PathLike[str], page: str | PathLike[str]) -> list[Path]:
    """The page and its figures; returns their paths. Figures of records that are gone are removed."""
    found, page = load_records(results), Path(page)
    if not found:
        raise InvalidValue(f"{results} holds no record; credo queue FILE --results {results} writes them.")
    folder = page.parent / "figures" / "results"
    drawn = {f"{name}.svg": figures.svg(figure) for name, figure in _figures(groups(found))}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, content in drawn.items():
        write_atomically(folder / name, content)
    write_atomically(page, results_page(found, Path(results), set(drawn)).encode())
    return [page, *(folder / name for name in drawn)]


def results_page(found: Sequence[StoredResult], root: Path, drawn: set[str]) -> str:
    """The text; `drawn` are the figures that there are, `root` is the folder of the records and of the queues."""
    every = groups(found)
    sections = [_section(group, root, drawn) for group in every]
    parts = [HEAD, _losses(every), *sections, _to_come(root), _machines(found)]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def groups(found: Sequence[StoredResult]) -> list[Group]:
    """The paper's size before CPU size, each in the order of the recipes."""
    order = list(RECIPES)
    by: dict[tuple[str, str], list[StoredResult]] = {}
    for result in found:
        by.setdefault((result.recipe, result.size), []).append(result)

    def rank(key: tuple[str, str]) -> tuple[bool, int, str]:
        return key[1] != "paper", order.index(key[0]) if key[0] in order else len(order), key[0]

    return [Group(*key, tuple(by[key])) for key in sorted(by, key=rank)]


# The sections


def _section(group: Group, root: Path, drawn: set[str]) -> str:
    if group.recipe == REGRESSION:
        return _regression(group, root)
    (table,) = tables(group.results)
    text = table_section(table).replace("### ", "## ", 1)
    pictures = [
        f"![{figures.CAPTIONS[kind][0]}](figures/results/{group.name}-{kind}.svg)\n"
        for kind in FIGURES
        if f"{group.name}-{kind}.svg" in drawn
    ]
    return "\n".join([text, *pictures, _files(group.results, root)])


def _files(results: Iterable[StoredResult], root: Path) -> str:
    """The records of a table, folder by folder."""
    by: dict[str, list[str]] = {}
    for result in results:
        place = result.folder.relative_to(root)
        by.setdefault(f"{root.name}/{place.parent.as_posix()}/", []).append(place.stem)
    lines = [f"`{folder}`: {', '.join(f'`{name}`' for name in names)}" for folder, names in by.items()]
    return "Records: " + "; ".join(lines) + ".\n"


def _figures(every: Sequence[Group]) -> Iterator[tuple[str, figures.Figure]]:
    for group in every:
        if group.recipe == REGRESSION:
            continue
        known = RECIPES.get(group.recipe)
        wanted = (known.figures if known else ()) or FIGURES
        for kind in FIGURES:
            figure = figures.draw(kind, group.results) if kind in wanted else None
            if figure is not None:
                yield f"{group.name}-{kind}", figure


# UCI: a line for each data set, a column for each method, the mean over splits

UCI_NOTE: Final = (
    "Mean over the splits ± its standard error, and in brackets the number of splits where it is not 20. Published: "
    "PBP (Hernández-Lobato and Adams 2015), MC-dropout with a grid search (Mukhoti et al. 2018), ensembles "
    "(Lakshminarayanan et al. 2017) and mean-field VI with the network of this table. Ours keep 40 training examples "
    "for the variance of the observations."
)
UCI_MEASURES: Final = (
    (Measure("rmse", "RMSE", "lower"), "rmse", 0),
    (Measure("nll", "NLL", "lower"), "nll_scaled", 1),
)


def _regression(group: Group, root: Path) -> str:
    by: dict[str, dict[str, list[StoredResult]]] = {}
    for result in group.results:
        name = str(result.training["data"]).split(":")[1]
        by.setdefault(name, {}).setdefault(result.row.partition("+")[0], []).append(result)
    rows = [
        row.name for row in RECIPES[REGRESSION].rows if any(row.name in methods for methods in by.values())
    ]
    parts = [f"## {RECIPES[REGRESSION].title}\n"]
    for measure, key, place in UCI_MEASURES:
        head = [measure.heading, *(label(row) for row in rows), *(f"*{name}*" for name in UCI_PUBLISHED)]
        parts += [line_of(head), line_of(["---", *("---:" for _ in head[1:])])]
        for name, methods in sorted(by.items()):
            cells = {row: standard_error(methods[row], key) for row in rows if row in methods}
            best = min((c.mean for c in cells.values() if math.isfinite(c.mean)), default=math.nan)
            ours = [_uci_cell(cells.get(row), len(methods.get(row, ())), best) for row in rows]
            others = [known[name][place] if name in known else None for known in UCI_PUBLISHED.values()]
            theirs = ["" if x is None else f"{x:.2f}" for x in others]
            parts.append(line_of([name, *ours, *theirs]))
        parts.append("")
    return "\n".join([*parts, f"{UCI_NOTE}\n", _files(group.results, root)])


def standard_error(results: Sequence[StoredResult], key: str) -> Cell:
    found = cell([result.metrics[key] for result in results])
    return Cell(found.mean, None if found.sd is None else found.sd / math.sqrt(len(results)))


def _uci_cell(found: Cell | None, splits: int, best: float) -> str:
    if found is None:
        return ""
    text = f"{found.mean:.2f}" + ("" if found.sd is None else f" ± {found.sd:.2f}")
    text = f"**{text}**" if f"{found.mean:.2f}" == f"{best:.2f}" else text
    return text if splits == 20 else f"{text} ({splits})"


# Where VOGN loses: first on the page

LOSSES: Final = (  # metric, how much worse counts, whether that is a share
    ("accuracy", 0.005, False),
    ("nll", 0.01, True),
    ("nll_scaled", 0.01, True),
    ("ece", 0.005, False),
    ("average_accuracy", 0.005, False),
)
OOD_LOSS: Final = 0.01
NOT_RIVALS: Final = ("vogn", "joint", "ogn", "noisy-kfac", "kfac")


def _losses(every: Sequence[Group]) -> str:
    lines = [line for group in every for line in _losses_of(group)]
    told = (
        "Beside Adam, SGD, MC-dropout, IVON and the other baselines of its table, counted from half a point of "
        "accuracy, 1 % of the NLL, .005 of the ECE and .01 of the mean OOD AUROC. VOGN is the row with nothing set "
        "where there are several. Few seeds: small differences may be chance.\n"
    )
    if not lines:
        return f"## Where VOGN loses\n\n{told}\nNowhere in the runs so far.\n"
    head = [
        line_of(["", "VOGN", "better", "worse by"]),
        line_of(["---", "---:", "---", "---:"]),
    ]
    return "\n".join(["## Where VOGN loses\n", told, *head, *lines, ""])


def _losses_of(group: Group) -> list[str]:
    by: dict[str, list[StoredResult]] = {}
    for result in group.results:
        by.setdefault(result.row, []).append(result)
    own = next((row for row in ("vogn-defaults", "vogn") if row in by), None)
    if own is None or group.recipe == REGRESSION:
        return []
    means = {row: _with_mean_ood(aggregate([dict(r.metrics) for r in found])) for row, found in by.items()}
    rivals = [row for row in by if not row.startswith(NOT_RIVALS)]
    found = []
    for key, margin, relative in (*LOSSES, ("ood_auroc", OOD_LOSS, False)):
        measure = _measure(key)
        mine = means[own].get(key, math.nan)
        sign = 1 if measure.better == "higher" else -1
        worse = {row: sign * (means[row].get(key, math.nan) - mine) for row in rivals}
        limit = margin * abs(mine) if relative else margin
        better = sorted((row for row in rivals if worse[row] > limit), key=lambda row: -worse[row])
        if better:
            names = ", ".join(f"{escape(label(row))} {measure.text(means[row][key])}" for row in better)
            gap = measure.text(worse[better[0]])
            where = f"[{escape(_title(group))}](#{_anchor(group)}): {measure.heading}"
            found.append(line_of([where, measure.text(mine), names, gap]))
    return found


def _with_mean_ood(cells: dict[str, Cell]) -> dict[str, float]:
    found = {name: c.mean for name, c in cells.items()}
    unfamiliar = [c.mean for name, c in cells.items() if name.startswith("ood_auroc.")]
    return found | ({"ood_auroc": sum(unfamiliar) / len(unfamiliar)} if unfamiliar else {})


def _measure(key: str) -> Measure:
    if key == "average_accuracy":
        return Measure(key, "average accuracy %", "higher", 1, percent=True)
    return measures_of([key])[0]


def _title(group: Group) -> str:
    known = RECIPES.get(group.recipe)
    return f"{known.title if known else group.recipe}, {group.size}"


def _anchor(group: Group) -> str:
    """As GitHub makes it of the heading."""
    (table,) = tables(group.results)
    heading = table_section(table).splitlines()[0].removeprefix("### ")
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


# What is still to come, and where the runs were made


def _to_come(root: Path) -> str:
    lines = []
    for path in sorted(root.glob("*.toml")):
        counts: dict[tuple[str, str], list[int]] = {}
        for job in load_queue(path):
            done, wanted = counts.setdefault((job.recipe, job.size), [0, 0])
            counts[job.recipe, job.size] = [done + job.record(root).exists(), wanted + 1]
        lines += [
            line_of([f"`{root.name}/{path.name}`", recipe, size, f"{done} of {wanted}"])
            for (recipe, size), (done, wanted) in counts.items()
            if done < wanted
        ]
    if not lines:
        return ""
    head = [line_of(["list", "recipe", "size", "finished"]), line_of(["---", "---", "---", "---:"])]
    return "\n".join(["## Still to come\n", *head, *lines, ""])


def _machines(found: Sequence[StoredResult]) -> str:
    """Versions, commits and machines of the runs, with how many runs each has."""
    counts: dict[tuple[str, str], int] = {}
    for result in found:
        facts = result.facts
        machine, versions = facts.get("machine") or {}, facts.get("versions") or {}
        where = f"{machine.get('processor') or 'unknown'}, torch {versions.get('torch', 'unknown')}"
        key = (where, str(facts.get("commit") or "unknown")[:7])
        counts[key] = counts.get(key, 0) + 1
    lines = [line_of([escape(where), f"`{commit}`", str(n)]) for (where, commit), n in sorted(counts.items())]
    head = [line_of(["machine", "commit", "runs"]), line_of(["---", "---", "---:"])]
    return "\n".join(["## Machines\n", *head, *lines, ""])
