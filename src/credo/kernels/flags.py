"""Whether the numbers of a step are finite: known to the devices before the host asks."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from credo.kernels import accelerator
from credo.kernels.tensors import by_device


@final
class Flags:
    """One flag for all tensors of a step, on each of their devices. Making it waits for none of them."""

    def __init__(self, tensors: Sequence[Tensor]):
        own: list[Tensor] = [
            accelerator.run("all_finite", [tensors[k] for k in places]) for places in by_device(tensors)
        ]
        first: Tensor = own[0]
        for other in own[1:]:
            first = first.logical_and(other.to(first.device, non_blocking=True))
        self._all: dict[torch.device, Tensor] = {flag.device: flag for flag in own} | {first.device: first}
        for device in self._all:
            if device != first.device:
                self._all[device] = first.to(device, non_blocking=True)
        self.first = first

    def on(self, device: torch.device) -> Tensor:
        """The flag, as a tensor on a device."""
        if device not in self._all:
            self._all[device] = self.first.to(device, non_blocking=True)
        return self._all[device]


@torch.no_grad()
def read(rows: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of short tensors, by one wait for each device."""
    found: list[list[float]] = [[]] * len(rows)
    for places in by_device(rows):
        own = [rows[k].detach().reshape(-1) for k in places]
        numbers = torch.cat(own).tolist()  # as wide as the widest of them
        for k, row in zip(places, own, strict=True):
            found[k], numbers = numbers[: len(row)], numbers[len(row) :]
    return found


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """The norm of each tensor, all on one device, where they stay."""
    return torch._foreach_norm(list(tensors), order)
