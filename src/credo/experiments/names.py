"""Names that users give: near misses are named in the error, and names that could leave a folder are refused."""

import difflib
import re
from collections.abc import Iterable
from typing import Final

from credo.errors import InvalidType, InvalidValue

# One plain part of a path that no system gives a meaning of its own: no separators, no leading dot or dash.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")


def nearest_first(name: str, valid: Iterable[str]) -> list[str]:
    """All valid names, those that look like `name` first."""
    names = sorted(valid)
    near = difflib.get_close_matches(name.lower(), names, n=len(names), cutoff=0.6)
    return near + [other for other in names if other not in near]


def unknown(kind: str, name: object, valid: Iterable[str]) -> InvalidValue:
    """The error for a name that is none of `valid`; to be raised by the caller."""
    names = nearest_first(str(name), valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InvalidValue(f"unknown {kind} {name!r}.{hint} There are: {', '.join(names) or 'none'}.")


def known(kind: str, name: object, valid: Iterable[str]) -> str:
    names = list(valid)
    if not isinstance(name, str):
        raise InvalidType(f"{kind} must be a name, got {type(name).__name__}; there are {', '.join(names)}.")
    if name not in names:
        raise unknown(kind, name, names)
    return name


def plain_name(kind: str, name: object) -> str:
    """A name that becomes a folder: letters, digits and ._+=- only, so that it stays inside its parent."""
    if not isinstance(name, str):
        raise InvalidType(f"{kind} must be a str, got {type(name).__name__}.")
    if PLAIN_NAME.fullmatch(name) is None or ".." in name:
        raise InvalidValue(
            f"{kind} {name!r} cannot name a folder: use at most 100 letters, digits and the characters _ . + = -, "
            "starting with a letter, digit or _; no path parts."
        )
    return name
