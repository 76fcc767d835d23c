"""SIGTERM as an exception outside training too, so that files are closed before the process ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from credo.experiments.stopping import Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises; threads other than the main one cannot receive signals and are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated()
