"""Results → tables: for every recipe and size, our rows with the paper's beneath them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from credo.experiments.methods import METHODS
from credo.experiments.names import label, set_label
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import RECIPES
from credo.experiments.results import Result
from credo.experiments.run_folder import described as described_training

# How each metric is headed, written and compared: the one list that terminal, Markdown and HTML share


@dataclass(frozen=True)
class Measure:
    """A column. Percentages are stored as fractions, as everywhere in credo, and written in per cent."""

    key: str
    heading: str
    better: Literal["higher", "lower", "neither"] = "neither"
    digits: int = 3  # 0 for counts, which have no spread
    percent: bool = False
    essential: bool = True  # shown in a terminal; the others only where there is room

    def text(self, mean: float, sd: float | None = None) -> str:
        """'67.32 ± 1.31', '0.938', or a dash for a number that is not defined."""
        if not math.isfinite(mean):
            return "–" if math.isnan(mean) else str(mean)
        factor = 100 if self.percent else 1
        spread = "" if sd is None or not self.digits else f" ± {factor * sd:.{self.digits}f}"
        return f"{factor * mean:.{self.digits}f}{spread}"


MEASURES: Final = (
    Measure("train_accuracy", "train accuracy %", digits=2, percent=True),
    Measure("accuracy", "accuracy %", "higher", digits=2, percent=True),
    Measure("accuracy_gap", "train − test accuracy", digits=2, percent=True),
    Measure("train_nll", "train NLL", essential=False),
    Measure("nll", "NLL", "lower"),
    Measure("nll_scaled", "NLL, T fitted", "lower", essential=False),
    Measure("nll_gap", "test − train NLL"),
    Measure("rmse", "RMSE", "lower"),
    Measure("brier", "Brier", "lower", essential=False),
    Measure("ece", "ECE", "lower"),
    Measure("ece_scaled", "ECE, T fitted", "lower", essential=False),
    Measure("temperature", "T", digits=2, essential=False),
    Measure("auroc", "AUROC", "higher"),
    # Of streams of tasks; none is marked as best, since one row is an upper bound
    Measure("average_accuracy", "average accuracy %", digits=1, percent=True),
    Measure("forgetting", "forgetting", digits=1, percent=True),
    Measure("backward_transfer", "backward transfer", digits=1, percent=True),
    Measure("epochs_per_task", "epochs a task", digits=0),
    Measure("epochs", "epochs", digits=0, essential=False),
    Measure("seconds_per_epoch", "s/epoch", digits=2),
    Measure("minutes", "minutes a run", digits=1),
)
OOD: Final = {
    "ood_auroc": Measure("ood_auroc", "OOD AUROC", "higher"),
    "ood_fpr95": Measure("ood_fpr95", "OOD FPR95", "lower"),
}
COSTS: Final = ("epochs_per_task", "epochs", "seconds_per_epoch", "minutes")
GAPS: Final = ("accuracy_gap", "nll_gap")


def measures_of(keys: Iterable[str]) -> tuple[Measure, ...]:
    """The columns for these metrics in our order, scores on unfamiliar data before epochs and seconds; no others.

    A key such as `ood_auroc.svhn` belongs to the measure before the dot.
    """
    present = set(keys)
    known = [measure for measure in MEASURES if measure.key in present]
    scores = [measure for measure in known if measure.key not in COSTS]
    return (*scores, *unfamiliar(present), *(measure for measure in known if measure not in scores))


def unfamiliar(keys: Iterable[str]) -> list[Measure]:
    """One column for each data set and score, the scores of a set beside each other."""
    split = [(key.partition(".")[2], key) for key in keys if key.partition(".")[0] in OOD]
    several = len({name for name, _ in split}) > 1
    found = []
    for name, key in sorted(split):
        base = OOD[key.partition(".")[0]]
        heading = f"{base.heading} {set_label(name)}" if several else base.heading
        found.append(Measure(key, heading, base.better))
    return found


# Several seeds as one number: mean and standard deviation


@dataclass(frozen=True)
class Cell:
    """mean ± sd over seeds; sd = √(Σ(x − mean)²/(n − 1)) is None for a single seed, which has none."""

    mean: float
    sd: float | None = None
    best: bool = False


def aggregate(runs: Sequence[Mapping[str, float]]) -> dict[str, Cell]:
    """Cell by metric, for the metrics that all runs have."""
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: cell([run[key] for run in runs]) for key in shared}


def cell(values: Sequence[float]) -> Cell:
    """A seed in which the metric is undefined leaves the mean undefined: leaving it out would flatter."""
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)
    if len(values) == 1:
        return Cell(mean)
    return Cell(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def with_derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, how far train and test are apart, and minutes for the seconds of a stream of tasks."""
    found = dict(metrics)
    if "seconds" in found:
        found["minutes"] = found["seconds"] / 60
    if "train_accuracy" in found and "accuracy" in found:
        found["accuracy_gap"] = found["train_accuracy"] - found["accuracy"]
    if "train_nll" in found and "nll" in found:
        found["nll_gap"] = found["nll"] - found["train_nll"]
    return found


# The tables

OURS, PUBLISHED = "credo", "paper"
CPU_REMARK = "CPU size: a smaller run than the paper's. Its numbers stand beside ours for orientation, not as a target."


@dataclass(frozen=True)
class Line:
    """One line: what was run (`who` = "credo") or what was published (`who` = "paper")."""

    row: str
    label: str
    who: str
    cells: Mapping[str, Cell]  # by metric
    remark: str = ""  # "3 seeds", "not run", …


@dataclass(frozen=True)
class Table:
    recipe: str
    size: str  # "cpu" or "paper"
    title: str
    source: str
    measures: tuple[Measure, ...]  # columns
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # row and how it was trained
    problem: str = ""  # what was trained on what: at CPU size it may be another problem than the paper's


def tables(results: Sequence[Result]) -> list[Table]:
    """One table for each recipe and size, in the order in which they first appear."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.recipe, result.size), []).append(result)
    return [table(recipe, size, group) for (recipe, size), group in groups.items()]


def table(name: str, size: str, results: Sequence[Result]) -> Table:
    known = RECIPES.get(name) or own_recipe(name, results)
    by_row: dict[str, list[Result]] = {}
    for result in results:
        by_row.setdefault(result.row, []).append(result)
    lines = [
        line for row in all_rows(known, by_row) for line in lines_of(row, size, by_row.get(row.name, []))
    ]
    keys = {key for line in lines for key in line.cells}
    wanted = {key for row in known.rows for key in row.published}
    measures = measures_of(key for key in keys if key not in GAPS or key in wanted)
    size_note = (CPU_REMARK,) if size == "cpu" and wanted else ()
    return Table(
        name,
        size,
        known.title,
        known.source,
        measures,
        marked(lines, measures),
        (*size_note, *((known.note,) if known.note else ())),
        tuple((label(row), described(found[0].training)) for row, found in by_row.items()),
        problem(results[0], known),
    )


def own_recipe(name: str, results: Sequence[Result]) -> Recipe:
    """The table of a recipe that is not credo's: its results are all that is known of it."""
    return Recipe(name, name, "", ())


def all_rows(recipe: Recipe, found: Mapping[str, Sequence[Result]]) -> list[Row]:
    """The recipe's rows, then those that only the results know."""
    names = {row.name for row in recipe.rows}
    return [*recipe.rows, *(Row(name, None, None) for name in found if name not in names)]


def lines_of(row: Row, size: str, results: Sequence[Result]) -> list[Line]:
    """Ours, then the paper's; nothing for a row that this size does not have."""
    training = row.training(size)
    if not results and training is None:
        return []
    name = label(row.name)
    if results:
        cells = aggregate([with_derived(result.metrics) for result in results])
        ours = Line(row.name, name, OURS, cells, seeds(results))
    else:
        ours = Line(row.name, name, OURS, {}, not_run(training))
    published = {key: Cell(mean, sd) for key, (mean, sd) in row.published.items()}
    return [ours, *([Line(row.name, name, PUBLISHED, published)] if published else [])]


def seeds(results: Sequence[Result]) -> str:
    return "1 seed" if len(results) == 1 else f"{len(results)} seeds"


def described(training: Mapping[str, object]) -> str:
    """All that decides the run and is not left at nothing, as `name = value`."""
    flat = {name: value for name, value in training.items() if not isinstance(value, Mapping)}
    for part in ("settings", "model_options"):
        value = training.get(part)
        flat.update(value if isinstance(value, Mapping) else {})
    told = {name: value for name, value in flat.items() if value not in (None, (), [], "", False)}
    return ", ".join(f"{name} = {value}" for name, value in told.items())


def problem(result: Result, recipe: Recipe) -> str:
    """'LeNet-5 on CIFAR-10, 10,000 training examples', or 'MLP on MNIST, 5 tasks'."""
    training = result.training
    if result.is_stream:  # what is stored of it leaves the model and the data to the recipe
        rows = [row.training(result.size) for row in recipe.rows if row.name == result.row]
        training = {**(described_training(rows[0]) if rows and rows[0] else {}), **training}
    size, tasks = training.get("train_size"), training.get("tasks")
    examples = f", {size:,} training examples" if isinstance(size, int) else ""
    count = f", {tasks} tasks" if isinstance(tasks, int) else ""
    model, data = (set_label(str(training.get(name, "own"))) for name in ("model", "data"))
    return f"{model} on {data}{examples}{count}"


def not_run(training: Training | None) -> str:
    if training is not None and training.tasks is None and training.method not in METHODS:
        return "no such method yet"
    return "not run"


def marked(lines: Sequence[Line], measures: Sequence[Measure]) -> tuple[Line, ...]:
    """Marks the best of our means in each column, all of them where they read the same."""
    for measure in measures:
        lines = [with_best(line, measure, best_text(lines, measure)) for line in lines]
    return tuple(lines)


def best_text(lines: Sequence[Line], measure: Measure) -> str | None:
    means = [line.cells[measure.key].mean for line in lines if line.who == OURS and measure.key in line.cells]
    means = [mean for mean in means if mean == mean]
    if measure.better == "neither" or len(means) < 2:
        return None
    return measure.text(max(means) if measure.better == "higher" else min(means))


def with_best(line: Line, measure: Measure, best: str | None) -> Line:
    cell = line.cells.get(measure.key)
    if cell is None or line.who != OURS or best is None or measure.text(cell.mean) != best:
        return line
    return replace(line, cells={**line.cells, measure.key: replace(cell, best=True)})


SIZES = {"cpu": "CPU size", "paper": "the paper's size"}


def heading(table: Table) -> str:
    """'VOGN and the prior variance (Figure 8: …), CPU size: LeNet-5 on CIFAR-10, 10,000 training examples'."""
    source = f" ({table.source})" if table.source else ""
    size = SIZES.get(table.size, table.size)
    return f"{table.title}{source}{f', {size}' if size else ''}: {table.problem}"
