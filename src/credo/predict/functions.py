"""A posterior draws functions: all that `predict` needs to know of one."""

from collections.abc import Iterator
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import nn

from credo.errors import InvalidType
from credo.posterior.base import Posterior
from credo.posterior.model_copy import StandIn
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read
from credo.predict.sampled import SampledFunctions


class Functions(Protocol):
    """A fixed set of functions, the same for every batch.

    The call yields what they answer, in chunks: tuples of tensors with a new first dimension, one row per
    function, whose lengths add up to the number of functions. Each chunk is made when it is asked for.
    """

    def __call__(self, batch: Batch) -> Iterator[Outputs]: ...


@runtime_checkable
class DrawsFunctions(Protocol):
    """What is not a Gaussian over weights (dropout masks, ensembles) joins `predict` by this one method.

    `read` turns what a model returns into the task's tensors, one row per example; `vectorise` is the caller's
    wish, as in `predict`.
    """

    def functions(
        self, model: nn.Module, samples: int, seed: int, read: Read, vectorise: bool | None
    ) -> Functions: ...


AnyPosterior: TypeAlias = Posterior | DrawsFunctions | Literal["mean"]


class PointFunction:
    """The model with its own weights: one function."""

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._stand_in, self._read = StandIn(model), read

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        output = batch.map(lambda t: t.clone()).call(self._stand_in.module)  # a model may write to its input
        yield tuple(tensor.unsqueeze(0) for tensor in self._read(output))


def functions_of(
    model: nn.Module, posterior: object, samples: int, seed: int, read: Read, vectorise: bool | None
) -> Functions:
    """What the posterior, of whatever kind, makes of this model."""
    if isinstance(posterior, Posterior):
        return SampledFunctions(model, posterior, samples, seed, read, vectorise)
    if isinstance(posterior, str) and posterior == "mean":
        return PointFunction(model, read)
    if isinstance(posterior, DrawsFunctions):
        return posterior.functions(model, samples, seed, read, vectorise)
    raise InvalidType(
        f"posterior must be a posterior (optimizer.posterior(), credo.load_posterior(...),"
        f" credo.DropoutPosterior(model), credo.Ensemble([...])) or 'mean', got {posterior!r:.80}"
    )
