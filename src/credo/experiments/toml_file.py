"""A TOML file of a user's, read strictly: what is wrong is an error with file and line, and nothing is guessed."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from credo.errors import CredoError, InvalidType, InvalidValue
from credo.experiments.names import unknown

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
