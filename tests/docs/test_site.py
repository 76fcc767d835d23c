"""The site's parts fit: navigation, links, the API reference, tutorials, what the hooks make of docstrings."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import credo
from tests.docs import pages

sys.path.insert(0, str(pages.ROOT / "tools" / "docs"))
import tutorials

API = sorted((pages.DOCS / "api").glob("*.md"))
TUTORIALS = sorted((pages.DOCS / "tutorials").glob("*.py"))
SUBMODULES = (
    *("optim", "posterior", "predict", "calibration", "baselines", "metrics", "continual", "data"),
    *("models", "distributed", "experiments", "kernels", "sklearn"),
)
MODULES = {*SUBMODULES, "errors", "integrations"}  # have a page each


def public_names() -> list[str]:
    found = {f"credo.{name}" for name in credo.__all__ if name not in MODULES}
    for part in SUBMODULES:
        module = importlib.import_module(f"credo.{part}")
        found |= {f"credo.{part}.{name}" for name in module.__all__}
    errors = {name for name, thing in vars(credo.errors).items() if isinstance(thing, type)}
    return sorted(found | {f"credo.errors.{name}" for name in errors if not name.startswith("_")})


def exists(link: str, page: Path) -> bool:
    target = (page.parent / link).resolve()
    made = target.with_suffix(".py")  # pages of tutorials are made from programs
    return target.exists() or (target.suffix == ".md" and made.exists())


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_in_the_reference_with_an_example(name: str) -> None:
    """As an object of mkdocstrings or, for another name of the same thing, under a heading."""
    short = name.rsplit(".", 1)[1]
    shown = [
        page
        for page in API
        if re.search(rf"^(::: credo(\.\w+)*\.{short}|## {short})$", page.read_text(), re.MULTILINE)
    ]
    assert shown, f"no page of docs/api has {name}"
    text = shown[0].read_text()
    code = "\n".join(block.code for block in pages.blocks(text))
    docstring = getattr(importlib.import_module(name.rsplit(".", 1)[0]), short).__doc__ or ""
    in_prose = re.search(rf"`[^`]*\b{short}\b", text.split(":::")[0])
    assert re.search(rf"\b{short}\b", code) or ">>>" in docstring or in_prose or "errors" in name


@pytest.mark.parametrize("path", pages.pages(), ids=pages.name)
def test_links_lead_somewhere(path: Path) -> None:
    """mkdocs checks the site's own; README and CONTRIBUTING are read elsewhere."""
    text = pages.FENCE.sub("", path.read_text())
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if not link.startswith(("http://", "https://")):
            assert exists(link, path), link


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)$", (pages.ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {str(page.relative_to(pages.DOCS)) for page in pages.DOCS.rglob("*.md")}
    assert listed == written | {f"tutorials/{path.stem}.md" for path in TUTORIALS}


def test_the_version_is_the_same_everywhere() -> None:
    package = (pages.ROOT / "pyproject.toml").read_text()
    citation = (pages.ROOT / "CITATION.cff").read_text()
    assert re.findall(r'^version = "(.*)"', package, re.MULTILINE) == [credo.__version__]
    assert re.findall(r"^version: (.*)", citation, re.MULTILINE) == [credo.__version__]
    assert f"## {credo.__version__} " in (pages.ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At their small size, every cell."""
    for library in ("transformers", "peft"):
        if re.search(rf"^import .*\b{library}\b", path.read_text(), re.MULTILINE):
            pytest.importorskip(library, reason="extra: hf")
    monkeypatch.chdir(tmp_path)
    page = tutorials.run(path)
    assert page.count("```python") == sum(cell.kind == "code" for cell in tutorials.cells(path.read_text()))


def test_cells_and_small_sizes() -> None:
    text = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nEPOCHS = 30  # small: 2\nprint(EPOCHS)\n"
    title, code = tutorials.cells(text)
    assert title == tutorials.Cell("markdown", "# Title\n\nText.")
    assert tutorials.SMALL.sub(r"\g<name>\g<value>", code.text) == "EPOCHS = 2\nprint(EPOCHS)"


def test_docstrings_become_lists_and_blocks() -> None:
    docstrings = pytest.importorskip("docstrings", reason="griffe comes with the extra docs")
    arguments = "lr, mu: α, of a[i][j]\n    and more (docs/defaults.md).\nseed: s"
    text = f"Title.\n\n    code[0]\n\n{arguments}\n\n>>> f(1)\n2\n\nEnd."
    assert docstrings.to_markdown(text).splitlines() == [
        *("Title.", "", "    code[0]", "", ""),
        *("- `lr`, `mu`: α, of a\\[i]\\[j]", "    and more ([defaults](../defaults.md)).", "- `seed`: s"),
        *("", "", "```python", ">>> f(1)", "2", "```", "", "End."),
    ]
