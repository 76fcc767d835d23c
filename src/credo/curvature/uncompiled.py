"""Blocks in which functions of `torch.compile` run as they were written.

A block sees the operations of a model one by one. A compiler sees them too, and breaks its graph at each that meets a
parameter: there would be as many graphs as layers, and no gain. What was compiled stays so for calls outside of blocks.
"""

import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, final

import torch

from credo.curvature.torch_private import COMPILER

__all__ = ["COMPILER", "Uncompiled", "uncompiled"]

Seen = TypeVar("Seen")


class _Stance:
    """torch's answer to calls of compiled functions is one for the process; blocks of several threads share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may end a block amid all this
        self._blocks = 0
        self._own: Any = None  # torch's stance while there are blocks

    def begin(self) -> bool:
        with self._lock:
            if not self._blocks:
                try:
                    self._own = torch.compiler.set_stance("force_eager")
                except (
                    RuntimeError
                ):  # the block is itself in a compiled function, where torch allows no change
                    return False
            self._blocks += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._own.__exit__(None, None, None)
                self._own = None


_STANCE = _Stance()


@final
class Uncompiled(AbstractContextManager[Seen]):
    """Another block, and in it nothing is compiled. It takes a while: for processes in which something is."""

    def __init__(self, block: AbstractContextManager[Seen]):
        self._block, self._open = block, False

    def __enter__(self) -> Seen:
        self._open = _STANCE.begin()
        try:
            return self._block.__enter__()
        except BaseException:
            self._end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> bool | None:
        try:
            return self._block.__exit__(kind, error, trace)
        finally:
            self._end()

    def __del__(self) -> None:
        self._end()  # an interrupt may have come before the end could

    def _end(self) -> None:
        if self._open:
            self._open = False
            _STANCE.end()


def uncompiled(block: AbstractContextManager[Seen]) -> AbstractContextManager[Seen]:
    """The block, in which nothing is compiled."""
    return Uncompiled(block) if COMPILER in sys.modules else block
