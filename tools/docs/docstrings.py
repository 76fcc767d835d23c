"""Turns credo's docstrings into Markdown for the API pages.

A docstring lists arguments as `name, other: text`, with further lines indented by four. Markdown would run such lines
together. Here each becomes an item of a list, and each doctest a block of Python.
"""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Object

ARGUMENT = re.compile(r"^(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (?P<text>\S.*)$")
PAGE = re.compile(r"docs/(?P<name>\w+)\.md")  # API pages lie one folder below
EXAMPLE = re.compile(r"^(>>>|\.\.\.)")


def to_markdown(text: str) -> str:
    """The docstring as Markdown; paragraphs, tables and indented code stay as they are."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    inside = ""  # what the line before belonged to: "argument", "example" or nothing
    for line in lines:
        argument = ARGUMENT.match(line)
        if EXAMPLE.match(line):
            if inside != "example":
                yield from ("", "```python")
            inside = "example"
            yield line
        elif inside == "example" and line.strip():
            yield line  # what the example prints
        elif inside == "example":
            yield from ("```", "")
            inside = ""
        elif argument is not None and (inside == "argument" or not inside):
            if inside != "argument":
                yield ""
            inside = "argument"
            names = ", ".join(f"`{name}`" for name in argument["names"].split(", "))
            yield f"- {names}: {_escaped(argument['text'])}"
        elif inside == "argument" and line.startswith("    "):
            yield _escaped(line)
        else:
            inside = "" if not line.strip() else "prose"
            yield line if line.startswith("    ") else _escaped(line)
    if inside == "example":
        yield "```"


def _escaped(line: str) -> str:
    """Square brackets of the mathematics are no links, names of pages are; those in backticks stay."""
    parts = line.split("`")
    parts[::2] = [part.replace("[", "\\[") for part in parts[::2]]
    return PAGE.sub(r"[\g<name>](../\g<name>.md)", "`".join(parts))


class Docstrings(Extension):
    """Called by mkdocstrings for every object that it has read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
