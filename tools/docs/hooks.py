"""What mkdocs calls while it builds the site: tutorials are run, and their pages and pictures added."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import tutorials


def on_files(files: Files, config: Any) -> Files:
    """Adds `tutorials/NAME.md` and its pictures for each `docs/tutorials/NAME.py`."""
    sources = sorted(Path(config["docs_dir"], "tutorials").glob("*.py"))
    for source in sources:
        folder = tutorials.rendered(source)
        for made in sorted(folder.iterdir()):
            if made.suffix == ".md":
                files.append(File.generated(config, f"tutorials/{made.name}", content=made.read_text()))
            elif made.suffix == ".png":
                files.append(File.generated(config, f"tutorials/{made.name}", content=made.read_bytes()))
    return files
