"""The command `credo`: what went wrong is one line on stderr and an exit code, never a traceback."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from credo.cli.exits import USAGE, exit_code, message_of, terminable

__all__ = ["main"]

NEEDED = ("tyro", "rich")  # what the command line is built with; experiments need more, and say so themselves


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process unless given. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"credo: {' and '.join(missing)} missing; install with: pip install 'credo[experiments]'",
            file=sys.stderr,
        )
        return USAGE
    return _guarded(words, debug)


def _guarded(words: list[str], debug: bool) -> int:
    from credo.cli.app import execute  # needs tyro

    try:
        with terminable(), plain_warnings():
            return execute(words)
    except BaseException as error:
        code = exit_code(error)
        if code is None or (debug and not isinstance(error, SystemExit)):
            raise
        if (message := message_of(error)) is not None:
            print(f"credo: {message}", file=sys.stderr)
        return code


@contextmanager
def plain_warnings() -> Iterator[None]:
    """A warning is a line for people here, without the place in the code."""

    def show(message: Warning | str, *place: object, **more: object) -> None:
        print(f"credo: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
