"""Where a result comes from: versions, kernels, cores and processor."""

import os
import platform
import sys
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
        "kernels": str(kernels.status()),
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processor": processor(),
            "system": platform.platform(),
        },
    }


def processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
