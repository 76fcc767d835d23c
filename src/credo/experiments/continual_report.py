"""The table and the figure of a recipe of continual learning, from the results of its runs."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credo.experiments.continual_recipe import ContinualRecipe, Size
from credo.posterior.files import write_atomically

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by row, one for each seed

MEASURES = ("average_accuracy", "forgetting", "backward_transfer")
LABELS = {"vogn": "VOGN", "vcl": "VCL", "ewc": "EWC", "adam": "Adam", "joint": "Adam, all tasks together"}


def write_report(recipe: ContinualRecipe, size: Size, results: Results, folder: Path) -> str:
    """table.md, average-accuracy.png and .svg; returns the table."""
    from credo.experiments.figures.files import save

    text = table(recipe, size, results)
    write_atomically(folder / "table.md", text.encode())
    save(average_accuracy_figure(recipe, results), folder / "average-accuracy")
    return text


def table(recipe: ContinualRecipe, size: Size, results: Results) -> str:
    """Markdown: mean ± sd over seeds, in per cent."""
    tasks = recipe.tasks[size]
    lines = [
        f"| {recipe.title} | epochs a task | average accuracy after {tasks} tasks | forgetting | backward transfer "
        "| minutes a run | seeds | published (10 tasks) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in recipe.rows:
        found = results.get(row.name, ())
        if found:
            published = "" if row.published is None else f"about {100 * row.published:.0f}"
            cells = [
                LABELS.get(row.name, row.name),
                str(row.training(size).epochs),
                *(
                    spread([100 * r[key] for r in found])
                    for key in ("average_accuracy", "forgetting", "backward_transfer")
                ),
                spread([r["seconds"] / 60 for r in found]),
                str(len(found)),
                published,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.1f}" if len(values) < 2 else f"{mean:.1f} ± {statistics.stdev(values):.1f}"


def average_accuracy_figure(recipe: ContinualRecipe, results: Results) -> Any:
    """Average accuracy against the number of tasks: the mean over seeds, with a band of one standard deviation."""
    import numpy

    from credo.experiments.figures.style import looks, new_figure, tidy

    figure = new_figure(5.2, 3.6)
    axes = figure.subplots()
    named = [row.name for row in recipe.rows if results.get(row.name)]
    for name, look in looks(named).items():
        curves = 100 * numpy.array([result["average_accuracies"] for result in results[name]])
        tasks, mean = numpy.arange(1, curves.shape[1] + 1), curves.mean(0)
        axes.plot(
            tasks,
            mean,
            color=look.colour,
            marker=look.marker,
            markersize=4,
            label=LABELS.get(name, look.label),
        )
        if len(curves) > 1:
            sd = curves.std(0, ddof=1)
            axes.fill_between(tasks, mean - sd, mean + sd, color=look.colour, alpha=0.15, linewidth=0)
        axes.set_xticks(tasks)
    tidy(axes, title=recipe.title, x="tasks learnt", y="average accuracy %")
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    return figure
