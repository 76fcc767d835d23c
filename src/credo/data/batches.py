"""Batches of tensors on the right device, in an order that can be left and taken up again anywhere."""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Generator, Tensor

from credo.data.augmentation import Augmentation
from credo.data.examples import Examples, LazyInputs, Normalise
from credo.errors import InvalidType, InvalidValue
from credo.validate import whole


def generator_for(purpose: str, *where: int) -> Generator:
    """A private stream for one purpose at one place; streams of different places are unrelated."""
    label = ":".join([purpose, *map(str, where)]).encode()
    seed = int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(seed)


def epoch_order(count: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The positions of all examples in the order of this epoch."""
    if not shuffle:
        return torch.arange(count)
    return torch.randperm(count, generator=generator_for("order", seed, epoch))


def share_of(count: int, rank: int, world: int) -> slice:
    """The rank's part of `count` examples: contiguous, sizes differing by at most one, together all."""
    return slice(count * rank // world, count * (rank + 1) // world)


Batch = tuple[Tensor, Tensor]


@final
class Batches:
    """One epoch after the other of (inputs, targets).

    Iterating yields what is left of the current epoch; when it is exhausted, `epoch` has advanced. Order and
    augmentation are functions of (seed, epoch, batch index) alone: `state_dict` is a position, exact at any moment,
    and taken inside the loop it means "the batch in hand is done".

    With `world` > 1, `batch_size` counts all ranks together and each rank yields its share of every batch. Shares may
    differ by one and be empty; joined in rank order they are, bit for bit, the batch that one process would yield.

    Tensors are moved to `device` once, at construction; lazy inputs batch by batch, the next one decoded ahead.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        normalise: Normalise | None = None,
        device: torch.device | str = "cpu",
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not isinstance(examples, Examples):
            raise InvalidType(f"examples must be credo.data.Examples, got {type(examples).__name__}")
        self.batch_size = whole("batch_size", batch_size, at_least=1)
        self.seed = whole("seed", seed, at_least=0)
        self.world = whole("world", world, at_least=1)
        self.rank = whole("rank", rank, at_least=0, below=self.world)
        if len(examples) == 0 or (drop_last and len(examples) < batch_size):
            raise InvalidValue(
                f"{len(examples)} examples make no batch of {batch_size} (drop_last={drop_last})"
            )
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.augmentation, self.normalise = augmentation, normalise
        self.device = torch.device(device)
        self.examples = examples.to(self.device)
        self.epoch, self.position = 0, 0
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.examples), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._ahead() if isinstance(self.examples.inputs, LazyInputs) else self._now()
        self.epoch, self.position = self.epoch + 1, 0

    def batch(self, epoch: int, index: int) -> Batch:
        """This rank's share of one batch of one epoch; changes nothing."""
        if not 0 <= index < len(self):
            raise InvalidValue(f"index must lie in 0..{len(self) - 1}, got {index}")
        members = self._epoch_order(epoch)[index * self.batch_size : (index + 1) * self.batch_size]
        share = share_of(len(members), self.rank, self.world)
        inputs, targets = self.examples.gather(members[share])
        if self.augmentation is not None:
            generator = generator_for("augmentation", self.seed, epoch, index)
            height, width = inputs.shape[-2:]
            draws = self.augmentation.draw(len(members), height, width, generator)  # for all ranks alike
            inputs = self.augmentation.apply(inputs, draws[share])
        inputs = inputs.to(self.device, non_blocking=True)
        return (inputs if self.normalise is None else self.normalise(inputs)), targets

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position = whole("epoch", epoch, at_least=0), 0

    def state_dict(self) -> dict[str, int]:
        """Where we are, and what the order depends on."""
        return {"epoch": self.epoch, "position": self.position, **self._signature()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position. Another seed, batch size or number of examples is another order: an error."""
        for name, own in self._signature().items():
            if state.get(name) != own:
                raise InvalidValue(
                    f"{name} was {state.get(name)!r} when saved and is {own} here; build the same Batches"
                )
        epoch = whole("epoch", state.get("epoch"), at_least=0)
        position = whole("position", state.get("position"), at_least=0, below=len(self) + 1)
        self.epoch, self.position = epoch, position

    def _signature(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "examples": len(self.examples),
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def _epoch_order(self, epoch: int) -> Tensor:
        known, order = self._order
        if known != epoch:
            order = epoch_order(len(self.examples), self.shuffle, self.seed, epoch)
            self._order = (epoch, order)
        return order

    def _now(self) -> Iterator[Batch]:
        while self.position < len(self):
            batch = self.batch(self.epoch, self.position)
            self.position += 1  # before the yield: a state taken in the loop's body counts this batch as done
            yield batch

    def _ahead(self) -> Iterator[Batch]:
        """As `_now`, with the next batch being decoded while the caller works on this one."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            waiting: tuple[int, int, Future[Batch]] | None = None
            while self.position < len(self):
                here = (self.epoch, self.position)
                if waiting is not None and waiting[:2] == here:
                    batch = waiting[2].result()
                else:
                    batch = self.batch(*here)
                self.position += 1
                if self.position < len(self):
                    epoch, position = self.epoch, self.position
                    waiting = (epoch, position, pool.submit(self.batch, epoch, position))
                yield batch
