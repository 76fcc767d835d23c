"""`credo info`: versions, kernels and devices."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from credo import kernels
from credo.cli.exits import OK
from credo.cli.version import VERSION

PACKAGES = (
    "numpy",
    "safetensors",
    "rich",
    "tyro",
    "matplotlib",
    "tensorboard",
    "scikit-learn",
    "scipy",
    "pillow",
)


def show() -> int:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts():
        table.add_row(f"[bold]{name}[/bold]", value)
    Console(highlight=False).print(table)
    return OK


def facts() -> Iterator[tuple[str, str]]:
    status = kernels.status()
    yield "credo", VERSION
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    running = f"C++ ({status.instruction_set})" if status.enabled else "pure torch"
    yield "kernels", f"{running}; {status.reason}"
    yield "devices", ", ".join(_devices())
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _devices() -> Iterator[str]:
    yield "cpu"
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if torch.backends.mps.is_available():
        yield "mps"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
