"""A posterior draws functions: all that `predict` needs to know of one, and those of a posterior over weights.

One function after the other, each a run of the model with the weights of one draw, is the rule. Several at a time, by
`torch.vmap` over stacked draws, are faster for small networks of linear layers: that saves Python and makes matrix
products larger, but intermediates too. Let a be the bytes of the largest intermediate of one function. The gain is lost
beyond a cache of about 10 MB, so 10 MB / a functions run at a time; below four vmap costs more than it saves; from a of
128 kB on the products of a single function are large enough. Measured on two AVX2 cores.

The same model and shapes always take the same path, and the same seed gives the same bits.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from credo.errors import InvalidType
from credo.kernels.scratch import expect_large_blocks
from credo.posterior.base import Posterior, Weights
from credo.posterior.model_copy import ModelCopy
from credo.predict.inputs import Batch
from credo.predict.prediction import Outputs, Read

STACKED = 64 * 2**20  # bytes of stacked weights alive at a time
CACHE = 10 * 10**6  # bytes that the largest intermediate of functions at a time may take
SMALL = 128 * 2**10  # bytes of the largest intermediate of one function, below which overhead decides
WORTH = 4  # functions at a time
SMALL_ANSWERS = 2**18  # bytes of answers that wait for each other
CLOSE = 1e-3  # relative: a vectorised answer further than this from the loop's is not trusted
LINEAR = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)  # the layers with weights of a network that gains by it
ONE_BY_ONE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # with operations that vmap has no rule for


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


class PointFunction:
    """The model with its own weights: one function."""

    def __init__(self, model: nn.Module, read: Read) -> None:
        self._module, self._read = ModelCopy(model).module, read

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        output = batch.map(lambda t: t.clone()).call(self._module)  # a model may write to its input
        yield tuple(tensor.unsqueeze(0) for tensor in self._read(output))


class WeightDraws:
    """The weights of functions 1 … C in order, as many at a time as one likes, and from the start again.

    Draw i depends on the posterior, the seed and i only. Those of a small network are kept for the next batch.
    """

    def __init__(self, copy: ModelCopy, posterior: Posterior, samples: int, seed: int) -> None:
        copy.check(posterior.mean)
        copy.take_buffers(posterior.buffers)
        self._copy, self._posterior, self._samples, self._seed = copy, posterior, samples, seed
        size = 0  # bytes of one draw
        for tensor in posterior.mean.values():
            size += tensor.numel() * tensor.element_size()
        self.most = max(1, STACKED // max(1, size))
        self._kept: Weights = {}
        self._versions = 0
        self.left = samples
        expect_large_blocks()

    def restart(self) -> None:
        self.left = self._samples
        self._generator = torch.Generator(self._posterior.device).manual_seed(self._seed)
        if self._samples <= self.most and (not self._kept or self._spoiled()):
            self._kept = self._draw(self._samples)
            self._versions = self._written()

    def take(self, most: int) -> Weights:
        """The next draws, stacked; at most that many."""
        start, n = self._samples - self.left, min(most, self.left, self.most)
        self.left -= n
        if not self._kept:
            return self._draw(n)
        return {name: tensor[start : start + n] for name, tensor in self._kept.items()}

    def _draw(self, n: int) -> Weights:
        return self._copy.placed(self._posterior.sample_many(self._generator, n))

    def _spoiled(self) -> bool:
        """Whether the model has written to its weights, in either way of running it."""
        return self._copy.wrote() or self._written() != self._versions

    def _written(self) -> int:
        total = 0
        for tensor in self._kept.values():
            total += tensor._version
        return total


class SampledFunctions:
    """f(·; w₁), ..., f(·; w_C), several at a time where that pays (`vectorise` None), never or wherever possible.

    Before functions run together, the first one is run by itself: a mistake in the model shows there, as itself, and
    the answers must agree, or the loop takes over.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        samples: int,
        seed: int,
        read: Read,
        vectorise: bool | None,
    ) -> None:
        self._copy, self._read, self._vectorise = ModelCopy(model), read, vectorise
        self._draws = WeightDraws(self._copy, posterior, samples, seed)
        self._most = min(samples, self._draws.most)
        self._layers = None if vectorise is False else _layers(self._copy)
        self._numbers: dict[tuple[object, ...], int] = {}  # of functions at a time, by the shapes of a batch
        self._writes = False  # whether the model changes its input in place

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        draws, shapes = self._draws, batch.shapes()
        draws.restart()
        known: Outputs | None = None
        if shapes not in self._numbers:
            known = self._looked_at(batch)
            self._numbers[shapes] = 1 if self._writes else self._number(batch)
            if self._numbers[shapes] > 1:
                draws.restart()
        if self._numbers[shapes] == 1:
            yield from _some_together(chain([] if known is None else [known], self._in_turn(batch)))
            return
        while draws.left:
            self._copy.release()
            weights = draws.take(self._numbers[shapes])
            outputs = self._together(weights, batch) if self._numbers[shapes] > 1 else None
            if outputs is None or (known is not None and not _agree(outputs, known)):
                self._numbers[shapes] = 1
                rest = range(0 if known is None else 1, _length(weights))
                answers = [] if known is None else [known]
                outputs = _joined([*answers, *[self._one(_row(weights, i), batch) for i in rest]])
            yield outputs
            known = None

    def _number(self, batch: Batch) -> int:
        """The rule above: how many functions at a time."""
        if self._layers is None or self._most == 1:
            return 1
        if not self._layers:  # not a network of linear layers
            return _even(self._most, WORTH) if self._vectorise else 1
        largest = _largest_intermediate(self._layers, batch)
        fitting = max(1, CACHE // max(1, largest))
        if self._vectorise:
            return _even(self._most, max(fitting, WORTH))
        number = _even(self._most, fitting)
        return number if number >= WORTH and largest <= SMALL else 1

    def _looked_at(self, batch: Batch) -> Outputs:
        """The first function's answer, to a copy of the batch: the model may write to its input."""
        private = batch.map(lambda tensor: tensor.clone())
        versions = [tensor._version for tensor in private.tensors()]
        answer = self._one(_row(self._draws.take(1), 0), private)
        self._writes |= versions != [tensor._version for tensor in private.tensors()]
        return answer

    def _in_turn(self, batch: Batch) -> Iterator[Outputs]:
        """The functions that are left, one by one."""
        while self._draws.left:
            self._copy.release()  # two draws alive at a time cost a large network a fifth of its speed
            yield self._one(_row(self._draws.take(1), 0), batch)

    def _one(self, weights: Weights, batch: Batch) -> Outputs:
        self._copy.load(weights)
        if self._writes:
            batch = batch.map(lambda tensor: tensor.clone())
        return tuple([tensor.unsqueeze(0) for tensor in self._read(batch.call(self._copy.module))])

    def _together(self, weights: Weights, batch: Batch) -> Outputs | None:
        """Rows of answers, one per function; None where vmap cannot."""

        def answer(own: Weights) -> Outputs:
            return self._read(functional_call(self._copy.module, own, batch.args, batch.kwargs))

        try:
            outputs: Outputs = torch.vmap(answer)(weights)
        except Exception:  # vmap knows many ways to say no, and the loop is right whatever it said
            return None
        return outputs


def _layers(copy: ModelCopy) -> list[nn.Module] | None:
    """The layers of a network of linear layers; none of another network; None where vmap must not be tried.

    Hooks would see batched tensors.
    """
    found: list[nn.Module] = []
    linear = True
    for module in copy.module.modules():
        if (
            copy.borrows
            or module._forward_hooks
            or module._forward_pre_hooks
            or isinstance(module, ONE_BY_ONE)
        ):
            return None
        if module._parameters:
            linear = linear and type(module) in LINEAR
            found.append(module)
    return found if linear else []


def _largest_intermediate(layers: list[nn.Module], batch: Batch) -> int:
    """Bytes, from the layers' sizes: every row that the first layer reads is a row of every other one."""
    first = next((layer.in_features for layer in layers if isinstance(layer, nn.Linear)), 1)
    widest = size = 0
    for layer in layers:
        widest = max(widest, layer.out_features) if isinstance(layer, nn.Linear) else widest
    for tensor in batch.tensors():
        size = max(size, -(-tensor.numel() // first) * widest * tensor.element_size())
    return size


def _even(samples: int, most: int) -> int:
    """The size of equal chunks, none above `most`: 32 samples that 20 fit into are two of 16."""
    return -(-samples // -(-samples // most))


def _row(weights: Weights, i: int) -> Weights:
    return {name: tensor[i] for name, tensor in weights.items()}


def _length(weights: Weights) -> int:
    return len(next(iter(weights.values())))


def _some_together(answers: Iterable[Outputs]) -> Iterator[Outputs]:
    """Small answers several at a time, which averages take in faster; copies, for a model may use its memory again."""
    waiting: list[Outputs] = []
    for answer in answers:
        size = 0
        for tensor in answer:
            size += tensor.numel() * tensor.element_size()
        waiting.append(answer if size >= SMALL_ANSWERS else tuple([tensor.clone() for tensor in answer]))
        if size * len(waiting) >= SMALL_ANSWERS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(answers: list[Outputs]) -> Outputs:
    if len(answers) == 1:
        return answers[0]
    return tuple([torch.cat(column) for column in zip(*answers, strict=True)])


def _agree(outputs: Outputs, known: Outputs) -> bool:
    return all(_close(many[:1], one) for many, one in zip(outputs, known, strict=True))


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    scale = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)
