"""What a user reads: docstrings name every argument, and `dir(credo)` what there is and nothing else."""

import inspect
import re

import pytest

import credo

CALLED = [
    name
    for name in credo.__all__
    if callable(getattr(credo, name))
    and name not in ("Calibration", "Contribution", "Stacked")  # made by credo
]


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_is_in_the_docstring(name: str) -> None:
    thing = getattr(credo, name)
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and "__init__" in vars(thing):
        text += thing.__init__.__doc__ or ""
    assert text
    arguments = [p for p in inspect.signature(thing).parameters if p not in ("self", "args", "kwargs")]
    if (
        name.endswith("Posterior") or name == "load_posterior"
    ):  # fields that are documented where they are read
        arguments = [p for p in arguments if p not in ("metadata", "path")]
    assert not [p for p in arguments if not re.search(rf"\b{p}\b", text)]


def test_dir_has_what_there_is() -> None:
    listed = set(dir(credo))
    assert set(credo.__all__) <= listed
    assert not {"Any", "TYPE_CHECKING", "import_module"} & listed
    for name in listed:
        getattr(credo, name)
