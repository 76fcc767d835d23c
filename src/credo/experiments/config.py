"""Recipes as TOML files, for comparisons of one's own without a line of Python.

    name = "mine"                    # required; also title, source, note, figures

    [training]                       # what all rows share: any field of Training
    model = "mlp"
    data = "digits"
    epochs = 20

    [[rows]]
    name = "vogn"                    # required
    method = "vogn"
    settings = { lr = 2e-3, damping = 1e-2 }

Nothing is guessed: a key that does not exist, is given twice or has another type is an error with file and line.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from credo.errors import InvalidType, InvalidValue
from credo.experiments.checks import check_training
from credo.experiments.methods import checked_options, method_of
from credo.experiments.names import plain_name
from credo.experiments.networks import options_of
from credo.experiments.overrides import FIELD_READERS, TABLES, read_field
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.toml_file import Path_, TomlFile

TOP: Final = ("name", "title", "source", "note", "figures", "training", "rows")
REQUIRED: Final = ("method", "model", "data")


def load_recipe(path: str | PathLike[str]) -> Recipe:
    """The recipe in a TOML file. Its rows are of CPU size."""
    return RecipeFile(Path(path)).recipe()


class RecipeFile(TomlFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "a recipe", "name and [[rows]]")

    def recipe(self) -> Recipe:
        top = self.tables
        self.check_keys((), top, TOP, required=("name", "rows"))
        with_type = {
            name: self.typed((name,), top.get(name, ""), str) for name in ("name", "title", "source", "note")
        }
        shared = self.typed(("training",), top.get("training", {}), dict)
        self.check_keys(("training",), shared, (*FIELD_READERS, *TABLES))
        rows = self.typed(("rows",), top["rows"], list)
        figures = self.typed(("figures",), top.get("figures", []), list)
        if not rows:
            raise self.at(("rows",), InvalidValue("a recipe needs at least one [[rows]]."))
        self.guard(("name",), plain_name, "name", with_type["name"])
        return Recipe(
            name=with_type["name"],
            title=with_type["title"] or with_type["name"],
            source=with_type["source"] or str(self.path),
            rows=tuple(self._row(k, row, shared) for k, row in enumerate(rows)),
            figures=tuple(figures),
            note=with_type["note"],
        )

    def _row(self, k: int, row: dict[str, Any], shared: dict[str, Any]) -> Row:
        here: Path_ = ("rows", k)
        self.typed(here, row, dict)
        self.check_keys(here, row, ("name", *FIELD_READERS, *TABLES), required=("name",))
        fields = {**shared, **{key: value for key, value in row.items() if key != "name"}}
        for table in TABLES:  # a row adds to the shared options
            fields[table] = {**shared.get(table, {}), **self.typed((*here, table), row.get(table, {}), dict)}
        for key in REQUIRED:
            if key not in fields:
                raise self.at(here, InvalidValue(f"row {row['name']!r} has no {key!r}, nor has [training]."))
        values = {key: self._field(self._where_is(k, row, key), key, value) for key, value in fields.items()}
        self._check_options(k, row, values)
        name = self.guard((*here, "name"), plain_name, "row name", row["name"])
        training = Training(**values)
        self.guard(here, check_training, training)
        return Row(str(name), paper=None, cpu=training)

    def _check_options(self, k: int, row: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Option by option, so that the line of a wrong one is found."""
        method = self.guard(self._where_is(k, row, "method"), method_of, values["method"])
        model = self.guard(self._where_is(k, row, "model"), options_of, values["model"])
        for table, known in (("settings", method.settings), ("model_options", model)):
            for name, value in values[table].items():
                mine = name in row.get(table, {})
                where: Path_ = ("rows", k, table, name) if mine else ("training", table, name)
                self.guard(where, checked_options, table, {name: value}, known)

    def _where_is(self, k: int, row: Mapping[str, Any], key: str) -> Path_:
        return ("rows", k, key) if key in row else ("training", key)

    def _field(self, where: Path_, key: str, value: Any) -> Any:
        if key in TABLES:
            return value
        if isinstance(value, str) and key not in ("method", "model", "data", "task"):
            raise self.at(where, InvalidType(f"{key} must not be in quotes: {value!r} is text."))
        return self.guard(where, read_field, key, value)
