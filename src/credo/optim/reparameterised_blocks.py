"""Blocks whose samples are reparameterised: one after the other, or all at once, with convolutions that may share."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

from credo.errors import InvalidValue
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer
from credo.optim.block import Block
from credo.optim.block_noise import BlockNoise
from credo.optim.losses import finish_closure
from credo.optim.reparameterisation import Reparameterised, Uncertain
from credo.optim.shards import blocks_a_step


class ReparameterisedOptimizer(BayesianOptimizer):
    """An optimiser whose update needs gradients by mean and variance."""

    _first_draw: int | None = None  # of those whose convolutions share their noise

    @abstractmethod
    def _uncertain(self) -> list[Uncertain]:
        """The parameters that have a variance, each with a leaf for its gradient."""

    @final
    @contextmanager
    def _sample(self, parameters: list[Tensor]) -> Iterator[Reparameterised]:
        draw = self._stream()
        noise = BlockNoise(self.settings["seed"], draw, self._shared_draw(draw))
        subjects, uncertain = self._subjects(parameters), self._uncertain()
        eyes = Reparameterised(subjects, self.settings["reduction"], uncertain, noise)
        with _uncompiled(), eyes as seen:
            try:
                yield seen
            finally:
                noise.closed = True
        self.counters["draws"] += noise.samples

    def _shared_draw(self, draw: int) -> int | None:
        """The draw whose noise the convolutions of this block have; None: their own."""
        if self.settings["convolution_samples"] is None:
            return None
        sharing = self.settings["mc_samples"] // self.settings["convolution_samples"]
        if self._first_draw is None or self._gathered.samples % sharing == 0:
            self._first_draw = draw
        return self._first_draw

    @final
    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_at_once(closure) if self.settings["vectorized"] else self._run_in_turn(closure)

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """A block for each sample of the convolutions, with all samples that share it; or one block with all."""
        self._gathered = self._nothing_gathered()
        losses, blocks = [], blocks_a_step(self.settings)
        for _ in range(blocks):
            self._first_draw = None
            with Block(self, None) as seen:
                assert isinstance(seen, Reparameterised)
                loss = seen.run_at_once(closure, self.settings["mc_samples"] // blocks) / blocks
                losses.append(finish_closure(loss, seen, "mean"))
        self._gathered.at_once()
        return torch.stack(losses).sum()


def _uncompiled() -> AbstractContextManager[object]:
    """Compiled functions that are called inside run as they were written: a compiler would not see the noise."""
    # Without dynamo, whose import takes seconds, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def shared_samples(samples: int, of_convolutions: int | None) -> int | None:
    """How many samples convolutions have; None where that is as many as the rest."""
    if of_convolutions is None or of_convolutions == samples:
        return None
    if samples % arguments.whole("convolution_samples", of_convolutions, 1):
        raise InvalidValue(
            f"convolution_samples must divide mc_samples={samples}, so that each is shared by equally many samples of "
            f"the other layers; got {of_convolutions}."
        )
    return of_convolutions
