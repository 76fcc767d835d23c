"""The processes of a run, as the training loop sees them; with one process, every method does the obvious and no more.

Rank 0 alone touches the run folder and the terminal. What it finds there, and every error, goes for all: no rank waits
for one that has given up. Decisions that depend on a clock or a signal are taken together, so that all ranks stop and
save at the same step.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from credo.data.batches import generator_for
from credo.distributed import World, agree, data_share, gather, outcome_of_all, outcome_of_first, world

T = TypeVar("T")


@final
class Ranks:
    def __init__(self, among: World | None = None) -> None:
        self._world = among or _for_messages()
        self.size, self.is_first, self.alone = self._world.size, self._world.rank == 0, self._world.alone

    def once(self, action: Callable[[], T]) -> T:
        """Rank 0 acts; what it returns (as JSON has it) or raises goes for all."""
        return outcome_of_first(self._world, action)

    def each(self, action: Callable[[], T]) -> T:
        """Every rank acts for itself; if one fails, all do."""
        return outcome_of_all(self._world, action)

    @contextmanager
    def held_once(self, lock: AbstractContextManager[None]) -> Iterator[None]:
        """Rank 0 holds the lock for all; if it cannot, no rank enters."""
        with ExitStack() as stack:
            self.once(lambda: stack.enter_context(lock))
            yield

    def warn(self, message: str) -> None:
        """Once, not once a rank."""
        if self.is_first:
            warnings.warn(message, stacklevel=4)

    def warn_of_another_number(self, before: int) -> None:
        if before != self.size:
            self.warn(
                f"the checkpoint was written by {before} process(es), and here are {self.size}: the run goes on, and "
                "is not bitwise what it would have been."
            )

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """An error on all ranks that names the first fact in which they differ."""
        agree(self._world, facts)

    def largest(self, *numbers: int) -> list[int]:
        """The maximum over the ranks of each number."""
        return self._world.largest(*numbers)

    def total(self, sums: Tensor) -> Tensor:
        """Σ over the ranks; the argument is left alone."""
        return torch.stack([row[0].to(sums.device) for row in gather(self._world, [sums])]).sum(0)

    def gathered(self, named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's tensors, on every rank, under this rank's names."""
        return [dict(zip(named, row, strict=True)) for row in gather(self._world, list(named.values()))]

    def own_part(self, parts: list[T]) -> T | None:
        """This rank's of what so many ranks have saved; None if they were another number."""
        return parts[self._world.rank] if len(parts) == self.size else None

    def data_share(self, mc_groups: int | None) -> tuple[int, int]:
        """(which share, of how many) of every batch this rank reads."""
        return data_share(mc_groups, among=self._world)

    def warn_of_unequal_shares(self, batch_size: int, shares: int) -> None:
        if batch_size % shares:
            self.warn(
                f"batch_size={batch_size} is not divisible by {shares} shares: true counts are used, and some ranks "
                "wait for those with an example more."
            )

    def test_share(self) -> tuple[int, int]:
        return self._world.rank, self.size

    def part_streams(self, device: torch.device, *where: int) -> None:
        """Gives each rank but the first a global stream of its own, which dropout draws from; a function of `where`."""
        if self.is_first:
            return
        seed = generator_for("rank", self._world.rank, *where).initial_seed()
        torch.default_generator.manual_seed(seed)
        if device.type not in ("cpu", "meta"):
            seed_device(device, seed)


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds the global generator of that very device: torch's own function seeds the current one's."""
    module = torch.get_device_module(device)
    current = getattr(module, "device", None)  # Apple's devices have none: there is one
    with nullcontext() if current is None else current(device.index or 0):
        module.manual_seed(seed)


def _for_messages() -> World:
    """Over the CPU: nccl carries nothing from there, and would make this process wait for the device."""
    all_ranks = world()
    if all_ranks.alone or dist.get_backend() == "gloo":
        return all_ranks
    return world(dist.new_group(backend="gloo"))
