"""A posterior draws functions: all that `predict` needs to know of one."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import nn

from credo.posterior.stand_in import StandIn
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read


class Functions(Protocol):
    """A fixed set of functions, the same for every batch.

    The call yields what they answer, in chunks: tuples of tensors with a new first dimension, one row per
    function, whose lengths add up to the number of functions. Each chunk is made when it is asked for.
    """

    def __call__(self, batch: Batch) -> Iterator[Outputs]: ...


@runtime_checkable
class DrawsFunctions(Protocol):
    """What is not a Gaussian over weights (dropout masks, ensembles) joins `predict` by this one method.

    `read` turns what a model returns into the task's tensors, one row per example.
    """

    def functions(self, model: nn.Module, samples: int, seed: int, read: Read) -> Functions: ...


class PointFunction:
    """The model with its own weights: one function."""

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._stand_in, self._read = StandIn(model), read

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        output = batch.map(lambda t: t.clone()).call(self._stand_in.module)  # a model may write to its input
        yield tuple(tensor.unsqueeze(0) for tensor in self._read(output))
