"""What calls of a kernel on tensors of one kind have in common, worked out once: sizes packed, memory asked for."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, final

import torch

from credo.kernels import native

LIMIT = 256  # kinds of tensors that are remembered: layers, batch sizes, lengths
_UNKNOWN: Any = object()
Plan = TypeVar("Plan")


@final
class Prepared(Generic[Plan]):
    """Plans by the kind of tensors that they are for. `make` gives None for kinds without one, which is known too."""

    def __init__(self, make: Callable[..., Plan | None]):
        self._make = make
        self.known: dict[Hashable, Plan | None] = {}

    def get(self, kind: Hashable, *arguments: Any) -> Plan | None:
        """The plan of a kind, made from `arguments` for the kernels and the threads that are in use now."""
        key = (kind, native.asked_for(), torch.get_num_threads())
        plan = self.known.get(key, _UNKNOWN)
        return self.add(key, *arguments) if plan is _UNKNOWN else plan

    def add(self, key: Hashable, *arguments: Any) -> Plan | None:
        """A new plan; `key` is its kind, with the kernels and the threads that it is made for."""
        if len(self.known) >= LIMIT:
            self.known.clear()
        plan = self.known[key] = self._make(*arguments)
        return plan
