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
from credo.experiments.build import options_of
from credo.experiments.methods import checked_options, method_of
from credo.experiments.names import plain_name, unknown
from credo.experiments.overrides import FIELD_READERS, TABLES, check_training, read_field
from credo.experiments.recipe import Recipe, Row, Training

# A user's TOML file, read strictly: what is wrong is an error with file and line, and nothing is guessed

try:
    import tomllib
except ImportError:  # Python 3.10
    try:
        import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    except ImportError:
        tomllib = None  # type: ignore[assignment]

Path_ = tuple[str | int, ...]  # ("rows", 1, "settings", "lr")
WORDS = {str: "text", dict: "a table", list: "a list", int: "a whole number"}


class TomlFile:
    """The file's text and tables; every error goes through `at`, which knows the line."""

    def __init__(self, path: Path, kind: str, needs: str) -> None:
        """`kind`: what the file is, with its article; `needs`: what it has at least."""
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no file {path}; {kind} is a TOML file") from error
        except UnicodeDecodeError as error:
            raise InvalidValue(f"{path}: {kind} is a TOML text in UTF-8; this is not: {error}.") from error
        self.tables = self._parsed(kind, needs)

    def check_keys(
        self, where: Path_, table: Mapping[str, Any], valid: Iterable[str], required: Iterable[str] = ()
    ) -> None:
        valid = list(valid)
        for key in table:
            if key not in valid:
                raise self.at((*where, key), unknown("key", key, valid))
        for key in required:
            if key not in table:
                raise self.at(where, InvalidValue(f"the key {key!r} is missing; nothing is assumed for it."))

    def typed(self, where: Path_, value: Any, kind: type) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.at(where, InvalidType(f"{where[-1]} must be {WORDS[kind]}, got {value!r}."))
        return value

    def guard(self, where: Path_, function: Any, *args: Any) -> Any:
        """The function's value; its error with the line of `where`."""
        try:
            return function(*args)
        except CredoError as error:
            raise self.at(where, error) from error

    def at(self, where: Path_, error: CredoError) -> CredoError:
        return type(error)(f"{self.path}:{line_of(self.text, where)}: {error}")

    def _parsed(self, kind: str, needs: str) -> dict[str, Any]:
        if tomllib is None:
            raise InvalidValue(f"reading {self.path} needs Python 3.11, or tomli: pip install tomli.")
        if not self.text.strip():
            raise InvalidValue(f"{self.path}:1: the file is empty; {kind} has at least {needs}.")
        try:
            return tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"line (\d+)", str(error))
            line = int(found.group(1)) if found else len(self.text.splitlines())
            content = self.text.splitlines()[line - 1].strip()
            raise InvalidValue(f"{self.path}:{line}: {error}: {content!r}.") from error


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


# A recipe as such a file

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
