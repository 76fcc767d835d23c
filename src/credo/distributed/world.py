"""Who takes part: the processes of `torch.distributed`, or this one alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from credo.errors import CallOrderError, CredoError, InvalidValue, RankLost


@contextmanager
def together() -> Iterator[None]:
    """Around a message: torch's many errors for a peer that is gone or silent become one, with its words in it."""
    try:
        yield
    except RuntimeError as error:
        raise _in_vain(error) from error


def _in_vain(error: RuntimeError) -> RankLost:
    return RankLost(
        f"rank {dist.get_rank()} has waited for the other ranks in vain: one has died, hangs past the timeout, or "
        f"is at another place in the program; its own message says why ({_in_short(error)})."
    )


_OF_MESSAGES = ("gloo", "nccl", "connection", "timed out", "process group", "processgroup")


def lost(error: BaseException) -> RankLost | None:
    """What an error means that came from messages which others have sent: FSDP2's, say; None of other errors."""
    if not isinstance(error, RuntimeError) or isinstance(error, CredoError):
        return None
    known = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _OF_MESSAGES)
    return _in_vain(error) if known else None


def _in_short(error: RuntimeError) -> str:
    """Without the place in torch's sources before the first sentence, and the advice after it."""
    return " ".join(str(error).split()).partition("] ")[2].partition(". ")[0][:300] or type(error).__name__


@dataclass(frozen=True)
class World:
    """The ranks of one process group; every method does nothing when there is only one."""

    rank: int
    size: int
    group: Any = None  # torch's handle; None for the default group

    @property
    def alone(self) -> bool:
        return self.size == 1

    def add_(self, tensor: Tensor) -> None:
        """Σ over the ranks, in place, the same bits on all."""
        if not self.alone:
            with together():
                dist.all_reduce(tensor, group=self.group)

    def largest(self, *numbers: int) -> list[int]:
        """The maximum over the ranks of each number."""
        if self.alone:
            return list(numbers)
        found = torch.tensor(numbers, device=self._device())
        with together():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [int(number) for number in found]

    def all(self, mine: bool) -> bool:
        """Whether it is so on every rank."""
        if self.alone:
            return mine
        against = torch.tensor([0.0 if mine else 1.0], device=self._device())
        self.add_(against)
        return not bool(against)

    def add_shares(self, row: Tensor) -> Tensor:
        """Σ over the ranks of this rank's part of a row, which is `size` equal parts long."""
        if self.alone:
            return row
        own = row.new_empty(row.numel() // self.size)
        with together():
            _reduce_scatter(own, row, group=self.group)
        return own

    def exchange_(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """rows[r], which all ranks have memory for, take rank r's values on all of them, bit for bit: one message."""
        lengths = [sum(_bytes(tensor) for tensor in row) for row in rows]
        if self.alone or not any(lengths):
            return
        device = next(tensor.device for row in rows for tensor in row)
        own = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        _through(own, rows[self.rank], lambda place, tensor: place.copy_(tensor))
        of_all = own.new_empty(self.size * len(own))
        with together():
            _all_gather(of_all, own, group=self.group)
        for rank, row in enumerate(rows):
            if rank != self.rank:
                _through(of_all[rank * len(own) :], row, lambda place, tensor: tensor.copy_(place))

    def swap_(self, given: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]]) -> None:
        """given[r] goes to rank r, bit for bit; taken[r] take what rank r has given this one: one message."""
        sizes = [[sum(_bytes(tensor) for tensor in row) for row in rows] for rows in (given, taken)]
        if not any(map(sum, sizes)):
            return
        device = next(tensor.device for row in (*given, *taken) for tensor in row)
        out, back = (torch.empty(sum(own), dtype=torch.uint8, device=device) for own in sizes)
        for part, row in zip(torch.split(out, sizes[0]), given, strict=True):
            _through(part, row, lambda place, tensor: place.copy_(tensor))
        with together():
            dist.all_to_all_single(back, out, sizes[1], sizes[0], group=self.group)
        for part, row in zip(torch.split(back, sizes[1]), taken, strict=True):
            _through(part, row, lambda place, tensor: tensor.copy_(place))

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values for all, one message for each dtype and device."""
        if self.alone:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for row in alike.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in row])
            with together():
                dist.broadcast(flat, self.first(), group=self.group)
            for tensor, part in zip(row, torch.split(flat, [t.numel() for t in row]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def first(self) -> int:
        """The number by which torch knows this group's rank 0."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank. Bytes in tensors: torch's own way for objects unpickles what arrives."""
        if self.alone:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(row.tolist()).decode() for row in self.gather_bytes(data)]

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Every rank's row of bytes, on every rank; lengths may differ."""
        if self.alone:
            return [data]
        data = data.to(self._device())
        sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(self.size)]
        with together():
            dist.all_gather(sizes, torch.tensor([len(data)], device=data.device), group=self.group)
            longest = max(int(size) for size in sizes)
            if longest == 0:
                return [data] * self.size
            padded = torch.nn.functional.pad(data, (0, longest - len(data)))
            rows = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(rows, padded, group=self.group)
        return [row[: int(n)] for row, n in zip(rows, sizes, strict=True)]

    def _device(self) -> torch.device:
        """Where messages must lie: nccl carries nothing from the CPU."""
        on_gpu = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


ALONE = World(0, 1)
ALIGNED = 8  # bytes: in a row of several types each number must lie where one of its type may
# Torch has been renaming these.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def _bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % ALIGNED


def _through(row: Tensor, tensors: Sequence[Tensor], move: Callable[[Tensor, Tensor], object]) -> None:
    """Moves between bytes and the tensors that lie there one after the other."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        move(row[start:end].view(tensor.dtype).view(tensor.shape), tensor.detach())
        start += _bytes(tensor)


def world(group: Any = None) -> World:
    """The world that `torchrun` and `init_process_group` have made; this process alone if they have not."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return World(dist.get_rank(group), dist.get_world_size(group), group)


def world_asked_for() -> World:
    """The world, where somebody has asked for one in so many words."""
    if not dist.is_available() or not dist.is_initialized():
        raise CallOrderError(
            "distributed=True, and there is no process group. Start with `torchrun --nproc-per-node 2 script.py`, and "
            "call torch.distributed.init_process_group first."
        )
    return world()


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Refuses, on every rank alike, facts in which ranks differ; names the first one."""
    mine = {key: repr(value) for key, value in facts.items()}
    of_all = [json.loads(text) for text in world.gather_texts(json.dumps(mine))]
    for rank, theirs in enumerate(of_all[1:], start=1):
        for key in dict.fromkeys([*of_all[0], *theirs]):
            first, other = of_all[0].get(key, "absent"), theirs.get(key, "absent")
            if first != other:
                raise InvalidValue(
                    f"ranks do not agree: {key} is {first} on rank 0 and {other} on rank {rank}. All processes must "
                    "build the same model and optimiser, with the same versions."
                )
