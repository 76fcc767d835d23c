"""Tutorials are Python files with percent cells: this runs them and writes their pages.

    python tools/docs/tutorials.py docs/tutorials/regression.py          # run it small, as the tests do
    python tools/docs/tutorials.py docs/tutorials/regression.py OUT      # run it, and write page and pictures into OUT

A cell begins with `# %%` (code) or `# %% [markdown]` (text in comments). A line such as `EPOCHS = 30  # small: 2` has
the second value when it is run small; pages show the first. What a cell prints and draws stands below it.
"""

import contextlib
import hashlib
import io
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE = Path(".cache/tutorials")
SMALL = re.compile(r"^(?P<name>\w+ = ).*?  # small: (?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A piece of a tutorial: Markdown, or Python."""

    kind: str  # "markdown" or "code"
    text: str


def cells(source: str) -> list[Cell]:
    """The cells of a file in the percent format."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            found.append(Cell("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            found.append(Cell("code", body.strip()))
    return found


def run(path: Path, out: Path | None = None) -> str:
    """Runs all cells in one namespace and returns the page; pictures go to `out`. Without it the run is small."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from style import STYLE

    page, pictures = [], 0
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with matplotlib.rc_context(STYLE):
        for cell in cells(path.read_text()):
            if cell.kind == "markdown":
                page.append(cell.text)
                continue
            code = cell.text if out else SMALL.sub(r"\g<name>\g<value>", cell.text)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(path), "exec"), namespace)
            page.append(
                "```python\n" + re.sub(r"  # small: .+$", "", cell.text, flags=re.MULTILINE) + "\n```"
            )
            if printed.getvalue().strip():
                page.append(f"```text\n{printed.getvalue().rstrip()}\n```")
            for number in pyplot.get_fignums():
                pictures += 1
                name = f"{path.stem}-{pictures}.png"
                if out:
                    pyplot.figure(number).savefig(out / name)
                page.append(f"![{namespace.get('CAPTION', path.stem)}]({name})")
            pyplot.close("all")
    page.append(f"[This page as a program]({path.name})")
    text = "\n\n".join(page) + "\n"
    if out:
        (out / f"{path.stem}.md").write_text(text)
    return text


def rendered(path: Path) -> Path:
    """The folder with page and pictures, made by a process of its own unless file and package are as before."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in [path, *sorted(here.glob("*.py")), *sorted(Path("src/credo").rglob("*.py"))]:
        digest.update(file.read_bytes())
    folder = CACHE / f"{path.stem}-{digest.hexdigest()[:16]}"
    if not (folder / f"{path.stem}.md").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, str(path.resolve()), str(folder.resolve())]
        with tempfile.TemporaryDirectory() as elsewhere:  # what a tutorial writes is not left in the tree
            subprocess.run(command, check=True, cwd=elsewhere)
    return folder


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
