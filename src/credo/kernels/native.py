"""Find the compiled kernels, choose an instruction set, and hand out their functions.

The library is loaded with ctypes, after torch, so that both use the one OpenMP runtime that torch has loaded already.
ctypes lets other Python threads run during a call; the kernels keep no state, and all memory is the caller's.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from credo.errors import InvalidValue

LIBRARY = Path(__file__).with_name(
    "libcredo_kernels.dylib" if sys.platform == "darwin" else "libcredo_kernels.so"
)
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")  # from worst to best, as `credo_cpu_level` counts them
CHOICES = ("off", *INSTRUCTION_SETS)

Kernel = Callable[..., int]
_forced: ContextVar[str | None] = ContextVar("credo_kernels", default=None)
asked_for = (
    _forced.get
)  # what `forced` asks for in this context: who remembers a choice remembers it under this


@dataclass(frozen=True)
class Status:
    """Which kernels run, and why."""

    enabled: bool
    instruction_set: str  # "none" when the pure-torch reference runs
    library: Path | None
    reason: str
    threads: int
    accelerator: str = "none"  # what runs on a GPU: "Triton", "plain torch", or "none" where there is no GPU
    accelerator_reason: str = ""

    def __str__(self) -> str:
        which = f"C++, {self.instruction_set}" if self.enabled else "pure torch"
        line = f"credo kernels: {which}, {self.threads} thread(s); {self.reason}"
        return line if self.accelerator == "none" else f"{line}; on the GPU: {self.on_the_gpu}"

    @property
    def on_the_gpu(self) -> str:
        """One line: what runs there, and why."""
        return f"{self.accelerator}; {self.accelerator_reason}"


def status() -> Status:
    """Which kernels run in this context, and why."""
    library, failure = load()
    found = LIBRARY if library else None
    chosen, asked_by = choice()
    from credo.kernels.triton.availability import accelerator  # which asks this file what was chosen

    rest = torch.get_num_threads(), *accelerator()
    if chosen == "off":
        return Status(False, "none", found, f"switched off by {asked_by}", *rest)
    if library is None:
        return Status(False, "none", None, failure, *rest)
    return Status(True, instruction_set(), found, f"chosen by {asked_by}", *rest)


@final
class forced(AbstractContextManager[None]):
    """Inside the block, in this context, run "off" (plain torch), "baseline", "avx2" or "avx512"."""

    def __init__(self, chosen: str):
        self._chosen = validated(chosen, "forced()")

    def __enter__(self) -> None:
        self._token = _forced.set(self._chosen)

    def __exit__(self, *_: object) -> None:
        _forced.reset(self._token)


def kernel(name: str) -> Kernel | None:
    """The C function `name` for the chosen instruction set, or None where the reference is to run."""
    chosen = choice()[0]
    if chosen == "off":
        return None
    library, failure = load()
    if library is None:
        warn_once(failure)
        return None
    return symbol(name, best() if chosen == "auto" else instruction_set())


def choice() -> tuple[str, str]:
    """What was asked for ("auto" when nothing was), and by whom."""
    if (chosen := _forced.get()) is not None:
        return chosen, "credo.kernels.forced"
    if chosen := environment():
        return validated(chosen, "CREDO_KERNELS"), "CREDO_KERNELS"
    return "auto", "what the processor supports"


@cache
def environment() -> str:
    """The variable, read once: it is asked for at every operation."""
    return os.environ.get("CREDO_KERNELS", "")


def validated(chosen: str, source: str) -> str:
    """`chosen` itself, or InvalidValue."""
    if chosen not in CHOICES:
        raise InvalidValue(
            f"{source} is {chosen!r}; allowed: {', '.join(CHOICES)}; leave it unset for the best."
        )
    return chosen


def available() -> tuple[str, ...]:
    """The instruction sets that the library holds and this processor has, from worst to best."""
    library, _ = load()
    return INSTRUCTION_SETS[: library.credo_cpu_level() + 1] if library else ()


def instruction_set() -> str:
    """The one to run: what was asked for, else the best there is."""
    chosen, asked_by = choice()
    if chosen == "auto":
        return best()
    if chosen not in available():
        raise InvalidValue(f"{asked_by} is {chosen!r}; this machine can run: off, {', '.join(available())}.")
    return chosen


@cache
def best() -> str:
    return available()[-1]


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY.name} was not built (a C++ compiler was missing when credo was installed?)"
    try:
        return ctypes.CDLL(str(LIBRARY)), ""
    except OSError as error:
        return None, f"{LIBRARY.name} could not be loaded: {error}"


@cache
def symbol(name: str, instruction_set: str) -> Kernel:
    """One exported function. All return an int64: 0, or the bytes of scratch that they need."""
    library, _ = load()
    function = getattr(library, f"credo_{instruction_set}_{name}")
    function.restype = ctypes.c_int64
    return function  # type: ignore[no-any-return]


@cache
def warn_once(failure: str) -> None:
    """Say once per process that plain torch runs: right results, more slowly."""
    warnings.warn(
        f"credo runs on its pure-torch kernels, which are slower: {failure}.", RuntimeWarning, stacklevel=4
    )


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's first element; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def address(place: int) -> ctypes.c_void_p:
    """Of memory that is no tensor."""
    return ctypes.c_void_p(place)


def integers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """The values as an array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


def suffix(dtype: torch.dtype) -> str:
    """What the names of the functions for this type end in."""
    return {torch.float32: "f32", torch.float64: "f64"}[dtype]
