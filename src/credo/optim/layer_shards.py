"""Kronecker factors that are spread over the ranks: each layer has an owner, who keeps and inverts its factors.

The owner also has the layer's momentum and prior, moves its mean, and draws its noise: for itself, and for each of the
other ranks from that rank's own stream, because a root is larger than the sample that is made of it. Parameters
without factors are few and small; every rank has all of theirs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor

from credo.distributed import World, gather
from credo.distributed.dividing import assign
from credo.optim.shards import Sharded, Shards


@final
class LayerShards(Shards):
    """`settings["owners"]` says by the name of a layer's weight who has it; the same on all ranks."""

    def __init__(self, everybody: World, sharded: bool):
        super().__init__(everybody, sharded)
        self.draws = 0  # of samples, since the last step

    def all(self, mine: bool) -> bool:
        """The sums are whole on every rank."""
        return mine

    def mine(self, optimizer: Sharded, name: str) -> bool:
        """Whether this rank has the layer of that weight; also as long as nobody owns it."""
        return not self.sharded or optimizer.settings["owners"].get(name, self.world.rank) == self.world.rank

    # A step

    @contextmanager
    def standing_in(self, optimizer: Sharded) -> Iterator[None]:
        try:
            yield
            if self.sharded:
                self.world.exchange_(self.members(optimizer))
        finally:
            self.draws = 0

    @property
    def must_catch_up(self) -> bool:
        return self.sharded

    def members(self, optimizer: Sharded) -> list[list[Tensor]]:
        """[rank] → the weights and biases of its layers, in the same order everywhere."""
        known, rows = _by_name(optimizer), [list[Tensor]() for _ in range(self.world.size)]
        for weight, bias in sorted(optimizer.settings["layers"].items()):
            row = rows[optimizer.settings["owners"][weight]]
            row += [known[name] for name in (weight, bias) if name is not None]
        return rows

    # Reading

    @contextmanager
    def whole(self, optimizer: Sharded, names: frozenset[str] | None = None) -> Iterator[None]:
        if not self.sharded:
            yield
            return
        known, own = _by_name(optimizer), self._own_state(optimizer)
        labels = [json.loads(text) for text in self.world.gather_texts(json.dumps(list(own)))]
        rows = gather(self.world, list(own.values()))
        for rank, (row, theirs) in enumerate(zip(rows, labels, strict=True)):
            for tensor, (name, kind) in zip(row, theirs, strict=True):
                if rank != self.world.rank:
                    optimizer.state[known[name]][kind] = tensor
        try:
            yield
        finally:
            self.cut_state(optimizer)

    def cut_state(self, optimizer: Sharded) -> None:
        """Layers that nobody owns, which are whole on every rank, find an owner; of others' layers nothing stays."""
        if self.sharded:
            self._assign(optimizer)
            known = _by_name(optimizer)
            for pair in optimizer.settings["layers"].items():
                for name in pair:
                    if name is not None and not self.mine(optimizer, pair[0]):
                        optimizer.state.pop(known[name], None)

    def _assign(self, optimizer: Sharded) -> None:
        """Old layers stay where their factors are; new ones go to the ranks that have least to do with those."""
        known, layers = _by_name(optimizer), optimizer.settings["layers"]
        costs = {weight: _cost(known[weight], bias is not None) for weight, bias in sorted(layers.items())}
        owners = {name: rank for name, rank in optimizer.settings["owners"].items() if name in layers}
        loads = [0.0] * self.world.size
        for name, rank in owners.items():
            loads[rank] += costs[name]
        new = [name for name in costs if name not in owners]
        found = assign([costs[name] for name in new], self.world.size, loads)
        optimizer.settings["owners"] = owners | dict(zip(new, found, strict=True))

    def _own_state(self, optimizer: Sharded) -> dict[tuple[str, str], Tensor]:
        """By name of the parameter and kind: what others do not have."""
        known, layers = _by_name(optimizer), optimizer.settings["layers"]
        mine = [pair for pair in layers.items() if self.mine(optimizer, pair[0])]
        names = [name for pair in mine for name in pair if name is not None]
        return {(name, kind): v for name in names for kind, v in optimizer.state.get(known[name], {}).items()}


def _cost(weight: Tensor, bias: bool) -> float:
    """About the work of inverting both factors, from what every rank knows of the layer."""
    rows = max(len(weight), 1)
    return float(rows**3 + (weight.numel() // rows + bias) ** 3)


def _by_name(optimizer: Sharded) -> dict[str, Tensor]:
    names = optimizer.names()
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
