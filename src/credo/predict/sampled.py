"""The functions that a posterior over weights draws from a model."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from credo.posterior.base import Posterior, Weights
from credo.posterior.model_copy import StandIn
from credo.predict.draws import Stream, WeightDraws
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read
from credo.predict.plan import LOOP, Meter, Plan, choose
from credo.predict.vectorise import run_together

SMALL_ANSWERS = 2**18  # bytes of answers that wait for each other
CLOSE = 1e-3  # relative: a vectorised answer further than this from the loop's is not trusted


class SampledFunctions:
    """f(·; w₁), ..., f(·; w_C), vectorised as `plan` decides (`vectorise` None), never or wherever possible.

    The first function is always run plainly too: a mistake in the model shows there, as itself, and the
    vectorised answer must agree with it, or the loop takes over.
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
        self._stand_in, self._read, self._vectorise = StandIn(model), read, vectorise
        self._draws = WeightDraws(self._stand_in, posterior, samples, seed)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._writes = False  # whether the model changes its input in place

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        shapes, stream, known = batch.shapes(), self._draws.stream(), None
        if shapes not in self._plans:
            known, self._plans[shapes] = self._look(stream.one(), batch)
            if self._plans[shapes] is not LOOP:
                stream.rewind()
        if self._plans[shapes] is LOOP:
            yield from _some_together(chain([] if known is None else [known], self._in_turn(stream, batch)))
            return
        while stream.left:
            plan = self._plans[shapes]
            self._stand_in.release()
            yield self._run(stream.take(plan.chunk), batch, plan, known, shapes)
            known = None

    def _look(self, weights: Weights, batch: Batch) -> tuple[Outputs, Plan]:
        """The first function's answer, and the plan for batches like this one."""
        private, meter = batch.map(lambda tensor: tensor.clone()), Meter()
        versions = [tensor._version for tensor in private.tensors()]
        with nullcontext() if self._vectorise is False else meter:
            answer = self._one(weights, private)
        self._writes |= versions != [tensor._version for tensor in private.tensors()]
        if self._vectorise is False or self._writes:
            return answer, LOOP
        draws, force = self._draws, self._vectorise is True
        plan = choose(meter, self._stand_in.module, min(draws.samples, draws.most), draws.bytes, force)
        return answer, plan

    def _in_turn(self, stream: Stream, batch: Batch) -> Iterator[Outputs]:
        """The functions that are left, one by one."""
        while stream.left:
            self._stand_in.release()  # two draws alive at a time cost a large network a fifth of its speed
            yield self._one(stream.one(), batch)

    def _run(
        self, weights: Weights, batch: Batch, plan: Plan, known: Outputs | None, shapes: tuple[object, ...]
    ) -> Outputs:
        if plan.chunk > 1:
            outputs = self._together(weights, batch, plan)
            if outputs is not None and (known is None or _agree(outputs, known)):
                return outputs
            self._plans[shapes] = LOOP
        singles = ({name: tensor[i] for name, tensor in weights.items()} for i in range(_length(weights)))
        return _joined([self._one(single, batch) for single in singles])

    def _one(self, weights: Weights, batch: Batch) -> Outputs:
        self._stand_in.load(weights)
        batch = batch.map(lambda tensor: tensor.clone()) if self._writes else batch
        return tuple(tensor.unsqueeze(0) for tensor in self._read(batch.call(self._stand_in.module)))

    def _together(self, weights: Weights, batch: Batch, plan: Plan) -> Outputs | None:
        try:
            return run_together(self._stand_in, weights, batch, self._read, plan.channels_last)
        except Exception:  # vmap knows many ways to say no, and the loop is right whatever it said
            return None


def _length(weights: Weights) -> int:
    return len(next(iter(weights.values())))


def _some_together(answers: Iterable[Outputs]) -> Iterator[Outputs]:
    """Small answers several at a time, which averages take in faster; copies, for a model may use its memory again."""
    waiting: list[Outputs] = []
    for answer in answers:
        size = sum(tensor.numel() * tensor.element_size() for tensor in answer)
        waiting.append(answer if size >= SMALL_ANSWERS else tuple(tensor.clone() for tensor in answer))
        if size * len(waiting) >= SMALL_ANSWERS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(answers: list[Outputs]) -> Outputs:
    if len(answers) == 1:
        return answers[0]
    return tuple(torch.cat(column) for column in zip(*answers, strict=True))


def _agree(outputs: Outputs, known: Outputs) -> bool:
    return all(_close(many[:1], one) for many, one in zip(outputs, known, strict=True))


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    scale = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    return torch.allclose(left, right, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)
