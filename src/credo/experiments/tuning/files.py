"""The files of a search beside the study itself: a recipe for `credo run`, the best numbers, and the page."""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from credo.experiments.log import to_json
from credo.experiments.recipe import Training
from credo.experiments.tuning.outcome import Tuned
from credo.experiments.tuning.page import page
from credo.posterior.files import write_atomically

RECIPE, BEST, PAGE = "recipe.toml", "best.json", "tuning.html"


def write_files(tuned: Tuned, title: str, row: str | None = None) -> list[Path]:
    """`row`: of the recipe that is written; a model or data of the user's own cannot stand in one."""
    written = {BEST: best(tuned), PAGE: page(tuned, title)}
    if row is not None and isinstance(tuned.base.model, str) and isinstance(tuned.base.data, str):
        written[RECIPE] = recipe_text(tuned, title, row)
    for name, text in written.items():
        write_atomically(tuned.folder / name, text.encode())
    return [tuned.folder / name for name in written]


def best(tuned: Tuned) -> str:
    found = {
        "method": tuned.base.method,
        "settings": dict(tuned.best.settings),
        "model_options": dict(tuned.best.model_options),
        "constructor": tuned.constructor,
        "validation": {"best": dict(tuned.best.scores), "defaults": dict(tuned.defaults.scores)},
        "trials": len(tuned.trials),
    }
    return to_json(found, indent=1) + "\n"


def recipe_text(tuned: Tuned, title: str, row: str) -> str:
    """TOML, as `credo.experiments.config` reads it; everything stands in the row."""
    note = (
        f"Found by credo tune: the best of {len(tuned.trials)} trials by NLL on validation data, {tuned.best.nll:.4f}; "
        f"the defaults had {tuned.defaults.nll:.4f}."
    )
    head = {"name": f"{title.replace(' ', '-')}-tuned", "title": f"{title}, tuned", "note": note}
    body = {"name": row, **given(tuned.training)}
    lines = [f"{key} = {toml(value)}" for key, value in head.items()]
    return "\n".join([*lines, "", "[[rows]]", *[f"{key} = {toml(value)}" for key, value in body.items()], ""])


def given(training: Training) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    found = {}
    for field in fields(training):
        value = getattr(training, field.name)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if value is not None and value != usual:
            found[field.name] = value
    return found


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml(part) for part in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    return "{ " + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + " }"
