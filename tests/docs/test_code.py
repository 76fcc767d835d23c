"""Every Python block of a page runs, in order, as a reader would paste it after the page's own first lines."""

import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs import pages
from tests.docs.prelude import prelude

# tests/optim/test_own_method.py puts the blocks of the one into a copy of the package. Those of the other need models
# and data of other libraries, which test_other_loops.py has.
ELSEWHERE = {"docs/own_method.md", "docs/integrations.md"}
WITH_PYTHON = [
    path
    for path in pages.pages()
    if pages.name(path) not in ELSEWHERE
    and any(b.language == "python" for b in pages.blocks(path.read_text()))
]
GENERATED = "docs/results.md"  # by `credo report --docs`; tests/experiments has its tests
STANDALONE = {"docs/index.md", "docs/quickstart.md", "README.md"}  # these bring all that they use


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "")  # gone again afterwards, whatever a page sets
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("path", WITH_PYTHON, ids=pages.name)
def test_blocks_run_in_order(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    namespace: dict[str, Any] = {} if pages.name(path) in STANDALONE else prelude(pages.name(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for block in pages.blocks(path.read_text()):
                if block.language == "python":
                    code = "\n" * block.line + block.code  # so that an error has the page's line
                    exec(compile(code, str(path), "exec"), namespace)
    finally:
        torch.set_rng_state(state)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", pages.pages(), ids=pages.name)
def test_blocks_say_their_language(path: Path) -> None:
    """A block without a language would be neither run nor coloured."""
    unnamed = [block.line for block in pages.blocks(path.read_text()) if not block.language]
    assert not unnamed, f"lines {unnamed}"


@pytest.mark.parametrize("path", [p for p in pages.pages() if pages.name(p) != GENERATED], ids=pages.name)
def test_no_indented_code(path: Path) -> None:
    """Indented blocks escape the test above. Items of lists are indented too, after a line that is not empty."""
    text = re.sub(pages.FENCE, "\n", path.read_text())
    lines = text.splitlines()
    bad = [
        line
        for before, line in pairwise(lines)
        if line.startswith("    ")
        and not before.strip()
        and not line.strip().startswith(("-", "members:", "options:"))
    ]
    assert not bad
