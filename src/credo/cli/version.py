"""The version, by name: no layer imports the package that gathers them all."""

from importlib import import_module
from typing import Final

VERSION: Final[str] = import_module("credo").__version__
