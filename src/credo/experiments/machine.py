"""Where a result comes from: versions, commit, kernels, cores and processor."""

import os
import platform
import subprocess
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import torch

from credo import kernels


def provenance() -> dict[str, object]:
    """What every run stores beside its settings."""
    version: str = import_module(
        "credo"
    ).__version__  # by name: no layer imports the package that gathers them all
    return {
        "versions": {"credo": version, "torch": torch.__version__, "python": sys.version.split()[0]},
        "commit": commit(),
        "kernels": str(kernels.status()),
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processor": processor(),
            "system": platform.platform(),
        },
    }


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the source tree credo is imported from, with "+" where files differ; None if installed.

    Asked once a process: what is imported later than a change of branch would not be told anyway.
    """
    here = Path(__file__).resolve().parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    head = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    return None if head is None else head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git here, or not one it trusts
        return None
    return found.stdout.strip()


def processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
