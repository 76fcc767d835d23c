"""Being asked to stop: the step under way is finished, the state saved, and only then the process ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

EXIT_CODE_TERMINATED: Final = 143  # 128 + SIGTERM, as shells and schedulers expect


class Terminated(SystemExit):
    """SIGTERM came, and the run is saved; ends the process with EXIT_CODE_TERMINATED unless it is caught."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE_TERMINATED)


class Stop(BaseException):
    """Inside the training loop: leave it here, where the state is whole. The signal may have come to another rank."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.signal = number

    def leave(self) -> NoReturn:
        """To be called when all is saved: what the signal would have done at once."""
        raise KeyboardInterrupt if self.signal == signal.SIGINT else Terminated


class StopRequest:
    """Which signal has come, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """SIGTERM and Ctrl-C become a request; a second Ctrl-C acts at once. In other threads signals are left alone."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        if request.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        request.signal = number

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
