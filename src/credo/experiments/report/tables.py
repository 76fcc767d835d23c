"""Results → tables: for every recipe and size, our rows with the paper's beneath them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from credo.experiments.labels import label, set_label
from credo.experiments.methods import METHODS
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import RECIPES
from credo.experiments.report.aggregate import Cell, aggregate, with_gaps
from credo.experiments.report.measures import GAPS, Measure, measures_of
from credo.experiments.results import Result

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
        problem(results[0].training),
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
    training = row.cpu if size == "cpu" else row.paper
    if not results and training is None:
        return []
    name = label(row.name)
    if results:
        cells = aggregate([with_gaps(result.metrics) for result in results])
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


def problem(training: Mapping[str, object]) -> str:
    """'LeNet-5 on CIFAR-10, 10,000 training examples'."""
    size = training.get("train_size")
    examples = f", {size:,} training examples" if isinstance(size, int) else ""
    return f"{set_label(str(training['model']))} on {set_label(str(training['data']))}{examples}"


def not_run(training: Training | None) -> str:
    if training is not None and training.method not in METHODS:
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
