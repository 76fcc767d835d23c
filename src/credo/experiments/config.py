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

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from credo.errors import CredoError, InvalidType, InvalidValue
from credo.experiments.checks import check_training
from credo.experiments.methods import checked_options, method_of
from credo.experiments.names import plain_name, unknown
from credo.experiments.networks import options_of
from credo.experiments.overrides import FIELD_READERS, TABLES, read_field
from credo.experiments.recipe import Recipe, Row, Training

try:
    import tomllib
except ImportError:  # Python 3.10
    try:
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    except ImportError:
        tomllib = None  # type: ignore[assignment]

TOP: Final = ("name", "title", "source", "note", "figures", "training", "rows")
REQUIRED: Final = ("method", "model", "data")
Path_ = tuple[str | int, ...]  # ("rows", 1, "settings", "lr")


def load_recipe(path: str | PathLike[str]) -> Recipe:
    """The recipe in a TOML file. Its rows are of CPU size."""
    return RecipeFile(Path(path)).recipe()


class RecipeFile:
    """The file's text and tables; every error goes through `at`, which knows the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidValue(f"{path}: a recipe is a TOML text in UTF-8; this is not: {error}.") from error
        self._tables = self._parsed()

    def recipe(self) -> Recipe:
        top = self._tables
        self._check_keys((), top, TOP, required=("name", "rows"))
        with_type = {
            name: self._typed((name,), top.get(name, ""), str) for name in ("name", "title", "source", "note")
        }
        shared = self._typed(("training",), top.get("training", {}), dict)
        self._check_keys(("training",), shared, (*FIELD_READERS, *TABLES))
        rows = self._typed(("rows",), top["rows"], list)
        figures = self._typed(("figures",), top.get("figures", []), list)
        if not rows:
            raise self._at(("rows",), InvalidValue("a recipe needs at least one [[rows]]."))
        self._guard(("name",), plain_name, "name", with_type["name"])
        return Recipe(
            name=with_type["name"],
            title=with_type["title"] or with_type["name"],
            source=with_type["source"] or str(self._path),
            rows=tuple(self._row(k, row, shared) for k, row in enumerate(rows)),
            figures=tuple(figures),
            note=with_type["note"],
        )

    def _row(self, k: int, row: dict[str, Any], shared: dict[str, Any]) -> Row:
        here: Path_ = ("rows", k)
        self._typed(here, row, dict)
        self._check_keys(here, row, ("name", *FIELD_READERS, *TABLES), required=("name",))
        fields = {**shared, **{key: value for key, value in row.items() if key != "name"}}
        for table in TABLES:  # a row adds to the shared options
            fields[table] = {**shared.get(table, {}), **self._typed((*here, table), row.get(table, {}), dict)}
        for key in REQUIRED:
            if key not in fields:
                raise self._at(here, InvalidValue(f"row {row['name']!r} has no {key!r}, nor has [training]."))
        values = {key: self._field(self._where_is(k, row, key), key, value) for key, value in fields.items()}
        self._check_options(k, row, values)
        name = self._guard((*here, "name"), plain_name, "row name", row["name"])
        training = Training(**values)
        self._guard(here, check_training, training)
        return Row(str(name), paper=None, cpu=training)

    def _check_options(self, k: int, row: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Option by option, so that the line of a wrong one is found."""
        method = self._guard(self._where_is(k, row, "method"), method_of, values["method"])
        model = self._guard(self._where_is(k, row, "model"), options_of, values["model"])
        for table, known in (("settings", method.settings), ("model_options", model)):
            for name, value in values[table].items():
                mine = name in row.get(table, {})
                where: Path_ = ("rows", k, table, name) if mine else ("training", table, name)
                self._guard(where, checked_options, table, {name: value}, known)

    def _where_is(self, k: int, row: Mapping[str, Any], key: str) -> Path_:
        return ("rows", k, key) if key in row else ("training", key)

    def _field(self, where: Path_, key: str, value: Any) -> Any:
        if key in TABLES:
            return value
        if isinstance(value, str) and key not in ("method", "model", "data", "task"):
            raise self._at(where, InvalidType(f"{key} must not be in quotes: {value!r} is text."))
        return self._guard(where, read_field, key, value)

    def _check_keys(
        self, where: Path_, table: Mapping[str, Any], valid: Iterable[str], required: Iterable[str] = ()
    ) -> None:
        valid = list(valid)
        for key in table:
            if key not in valid:
                raise self._at((*where, key), unknown("key", key, valid))
        for key in required:
            if key not in table:
                raise self._at(where, InvalidValue(f"the key {key!r} is missing; nothing is assumed for it."))

    def _typed(self, where: Path_, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            words = {"str": "text", "dict": "a table", "list": "a list"}
            raise self._at(where, InvalidType(f"{where[-1]} must be {words[kind.__name__]}, got {value!r}."))
        return value

    def _guard(self, where: Path_, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except CredoError as error:
            raise self._at(where, error) from error

    def _at(self, where: Path_, error: CredoError) -> CredoError:
        return type(error)(f"{self._path}:{line_of(self._text, where)}: {error}")

    def _parsed(self) -> dict[str, Any]:
        if tomllib is None:
            raise InvalidValue("reading recipes from files needs Python 3.11, or tomli: pip install tomli.")
        if not self._text.strip():
            raise InvalidValue(f"{self._path}:1: the file is empty; a recipe has at least name and [[rows]].")
        try:
            return tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"line (\d+)", str(error))
            line = int(found.group(1)) if found else len(self._text.splitlines())
            content = self._text.splitlines()[line - 1].strip()
            raise InvalidValue(f"{self._path}:{line}: {error}: {content!r}.") from error


def line_of(text: str, where: Path_) -> int:
    """The line of a key, or of the table it belongs to: the header first, then the key below it."""
    lines, line = text.splitlines(), 0
    parts = list(where)
    while parts:
        part = parts.pop(0)
        if parts and isinstance(parts[0], int):
            headers = [n for n, content in enumerate(lines) if re.match(rf"\s*\[\[\s*{part}\s*\]\]", content)]
            number = int(parts.pop(0))
            line = headers[number] if number < len(headers) else line
            continue
        pattern = rf"\s*\[(.*\.)?\s*\"?{part}\"?\s*\]|(.*[\s{{,.\"])?{re.escape(str(part))}\"?\s*[=.]"
        found = next((n for n in range(line, len(lines)) if re.match(pattern, lines[n])), None)
        line = line if found is None else found
    return line + 1
