"""All of a search as one HTML page: the trials, the lines to paste and optuna's plots, with nothing to be fetched."""

import math
import warnings
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Final

from credo.experiments.sheet import SHEET
from credo.experiments.tuning.outcome import Tuned, cells

PLOTS: Final = (  # optuna's name, our heading, and how many complete trials make it worth looking at
    ("plot_optimization_history", "NLL of the trials, in their order", 1),
    ("plot_intermediate_values", "NLL in the course of each trial", 1),
    ("plot_param_importances", "How much each number matters", 4),
    ("plot_slice", "NLL over each number", 2),
    ("plot_parallel_coordinate", "All numbers of each trial", 2),
)
WARNING: Final = "A NLL that is the least of many is a little too good: judge the found numbers on test data."
OWN_SHEET: Final = (
    "pre { white-space: pre-wrap; padding: 0.8em; background: #8881; } table { margin-bottom: 1.5em; } "
    "td:nth-child(4), td:nth-child(5), th:nth-child(4), th:nth-child(5) { text-align: left; }"
)


def page(tuned: Tuned, title: str) -> str:
    heading = f"Tuning {title}: {tuned.base.method}"
    plots = "".join(plot_sections(tuned))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title>\n<style>{SHEET}{OWN_SHEET}</style>\n{script()}\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(heading)}</h1>\n<p>{escape(tuned.verdict)} {WARNING}</p>\n"
        f"<pre><code>{escape(tuned.constructor)}</code></pre>\n{grid(tuned)}\n{plots}</main>\n</body>\n</html>\n"
    )


def grid(tuned: Tuned) -> str:
    """Every trial, the best first."""
    order = {"complete": 0, "dropped early": 1, "failed": 2}
    ranked = sorted(tuned.trials, key=lambda t: (order[t.state], math.inf if math.isnan(t.nll) else t.nll))
    lines = []
    for t in ranked:
        number, nll, accuracy, words = cells(t, tuned.base)
        what = t.state if t.state != "failed" else f"failed: {t.reason}"
        shown = (number, nll, accuracy, words, what, f"{t.epochs}", f"{t.seconds:.1f}")
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in shown) + "</tr>")
    head = ("trial", "NLL", "accuracy", "numbers", "end", "epochs", "seconds")
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{''.join(lines)}</table>"


def script() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]

    return f"<script>{get_plotlyjs()}</script>"


def plot_sections(tuned: Tuned) -> Iterator[str]:
    from optuna import visualization
    from plotly.io import to_html  # type: ignore[import-untyped,unused-ignore]

    for name, caption, fewest in PLOTS:
        enough = len(tuned.complete) >= fewest
        figure = drawn(getattr(visualization, name), tuned.study) if enough else None
        if figure is not None:
            figure.update_layout(title=None, margin={"t": 30})
            figure.for_each_yaxis(named)
            body = to_html(figure, include_plotlyjs=False, full_html=False, div_id=name.removeprefix("plot_"))
            yield f"<h2>{escape(caption)}</h2>\n{body}\n"


def named(axis: Any) -> None:
    if axis.title.text in ("Objective Value", "Intermediate Value"):
        axis.title.text = "validation NLL"


def drawn(plot: Callable[[Any], Any], study: Any) -> Any:
    """None where the trials are too much alike for this plot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            figure = plot(study)
        except (ValueError, RuntimeError, ImportError, ZeroDivisionError):
            return None
    return figure if len(figure.data) else None
