"""Prediction by many processes: each takes some of the batches, and all get the whole answer.

Batch k is rank k mod P's, so that a loader's batches are the same as for one process, and the answers too, bit for
bit. A single tensor is cut into P parts first, which changes the rounding of some matrix products, and nothing else:
the functions drawn depend on the seed only.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from credo.distributed import World, gather, outcome_of_all
from credo.errors import InvalidValue
from credo.predict.inputs import Batch
from credo.predict.prediction import AnyPrediction


class Turns:
    """Hands out this rank's batches, and counts them all."""

    def __init__(self, world: World) -> None:
        self._world, self.seen = world, 0

    def mine(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.seen += 1
            if (self.seen - 1) % self._world.size == self._world.rank:
                yield batch


def of_all_ranks(
    world: World,
    turns: Turns,
    device: torch.device | None,
    rebuilt: Callable[..., AnyPrediction],
    work: Callable[[], list[AnyPrediction]],
) -> list[AnyPrediction]:
    """The predictions for all batches, in their order; an error on one rank is an error on all."""
    own = outcome_of_all(world, work)
    count = torch.tensor(turns.seen, device=device)
    found = gather(world, [count, *(tensor for prediction in own for tensor in _tensors(prediction))])
    counts = [int(row[0]) for row in found]
    if len(set(counts)) > 1:
        raise InvalidValue(
            f"with distributed=True all ranks must give the same inputs; by rank they yielded {counts} batches"
        )
    queues = [
        _predictions(rebuilt, row[1:], _turns(world, rank, counts[0])) for rank, row in enumerate(found)
    ]
    return [next(queues[k % world.size]) for k in range(counts[0])]


def _turns(world: World, rank: int, batches: int) -> int:
    return len(range(rank, batches, world.size))


def _tensors(prediction: AnyPrediction) -> list[Tensor]:
    found = [getattr(prediction, field.name) for field in fields(prediction)]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _predictions(
    rebuilt: Callable[..., AnyPrediction], tensors: list[Tensor], batches: int
) -> Iterator[AnyPrediction]:
    """`samples`, which may be missing, is the last tensor."""
    each = len(tensors) // max(batches, 1)
    return (rebuilt(*tensors[k * each : (k + 1) * each]) for k in range(batches))
