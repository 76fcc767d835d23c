"""Triton's programs on the devices of `emulated`: they run on the CPU tensors inside, and count as launches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from credo.kernels import accelerator
from credo.kernels.triton import launching, lists, normalisation, offers, sums
from tests.device.emulated import OnDevice


@contextmanager
def offered(launch: Callable[..., bool]) -> Iterator[list[str]]:
    """In the block tasks go to Triton's functions, which start programs by `launch`; the programs, in order."""
    started: list[str] = []

    def counted(name: str, *arguments: Any, **constants: Any) -> bool:
        started.append(name)
        if name == "lists.all_finite":
            started.append("aten.new_ones")  # the flag; what is inside is not counted by itself
        return launch(name, *arguments, **constants)

    def added(out: Tensor) -> tuple[Tensor, Tensor]:
        started.append("aten.sum")
        return _added(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_added", added)
        for module in (lists, sums, normalisation):
            patch.setattr(module, "launch", counted)
        for function in offers.OFFERED:
            patch.setitem(accelerator._offered, function.__name__, [_on_what_is_inside(function)])
        yield started


interpret, _added = launching.launch, sums._added


def count(name: str, grid: Any, *arguments: Any, **constants: Any) -> bool:
    """Starts nothing; results are alike, and not zero."""
    places = {"sums": (2,), "normalisation.batch_norm_shares": (4,), "normalisation.batch_norm_totals": (1,)}
    places["normalisation.batch_norm_input"] = (6,)
    for place in places.get(name, places.get(name.partition(".")[0], ())):
        arguments[place].fill_(0.01)
    return True


def _on_what_is_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def own(*arguments: Any) -> Any:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        found = function(*map(_inside, arguments))
        return found if found is NotImplemented else _outside(found, first.device)

    return own


def _inside(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.inner
    return list(map(_inside, value)) if isinstance(value, list) else value


def _outside(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return OnDevice(value, device)
    return tuple(_outside(own, device) for own in value) if isinstance(value, tuple) else value
