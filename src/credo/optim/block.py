"""One sample of a step: a block in which the weights are that sample, and whose backward passes are gathered."""

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, final

from credo.optim import checks
from credo.optim.gathering import Seen

if TYPE_CHECKING:
    from credo.optim.base import BayesianOptimizer


@final
class Block(AbstractContextManager[Seen]):
    """Gradients begin at none in it. If it fails they are what they were before; else the sums over samples so far."""

    def __init__(self, optimizer: "BayesianOptimizer", scale: float | None):
        self._open = False
        self._optimizer, self._scale, self._token = optimizer, scale, object()

    def __enter__(self) -> Seen:
        own = self._optimizer
        if own._inside is not None:
            own._refuse_inside("open a sampling block")
        checks.require_gradients()
        self._parameters = own._trainable()
        self._before = [p.grad for p in self._parameters] if own._gathered.samples else None
        try:
            self._open, own._block, own._inside = True, self._token, threading.get_ident()
            for p in self._parameters:
                p.grad = None
            self._sample = own._sample(self._parameters)
            self._seen = self._sample.__enter__()
            return self._seen
        except BaseException:
            self._give_up()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own, examples = self._optimizer, -1
        try:
            self._sample.__exit__(kind, error, trace)
            if kind is None:
                examples = own._gather(self._seen, self._parameters, self._before, self._scale)
        finally:  # also after an interrupt: nobody else would open the optimiser again
            self._open, own._inside = False, None
            if examples < 0:
                self._give_up()
        if examples > own.settings["data_size"] and not own._warned:
            checks.warn_of_small_data(examples, own.settings["data_size"])
            own._warned = True

    def __del__(self) -> None:
        # An interrupt came before the end could; unless a traceback has kept this one until after the next was opened.
        if self._open and self._optimizer._block is self._token:
            self._give_up()

    def _give_up(self) -> None:
        own = self._optimizer
        own._keeper.__exit__()
        self._open, own._inside = False, None
        if not own._gathered.samples:  # it may have been on the way to become the first
            own._gathered = own._nothing_gathered()
        for k, p in enumerate(self._parameters):
            p.grad = None if self._before is None else self._before[k]
