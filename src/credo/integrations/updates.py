"""One sampling block for all micro-batches of an update, in loops that call forward and backward by themselves.

Each micro-batch's loss is its share of the update's mean loss. The block opens before the first and closes after the
last, so that all of them are at the same weight sample, `.grad` is the gradient of the whole, and clipping finds it
there. These loops divide each loss by a fixed number of micro-batches n. At the end of an epoch an update may have
m < n: the losses then add up to m/n of a mean, and the block makes gradients and squares whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor, nn

from credo.errors import InvalidValue, UnsupportedOperation
from credo.optim import BayesianOptimizer
from credo.posterior import Posterior
from credo.posterior.model_copy import ModelCopy
from credo.validate import whole


@final
class UpdateBlock:
    """The block of the update under way, if one is."""

    def __init__(self) -> None:
        self._open: ExitStack | None = None
        self._optimizer: BayesianOptimizer | None = None
        self._share = 0.0  # of a mean that the micro-batches so far are
        self.last = False  # whether the one under way is the last; for loops that learn it amid one

    def __bool__(self) -> bool:
        return self._open is not None

    def begin(self, optimizer: BayesianOptimizer, scale: float | None = None) -> None:
        """Before the first micro-batch; before further ones it does nothing."""
        if self._open is None:
            refuse_several_samples(optimizer)
            block = ExitStack()
            block.enter_context(optimizer.sampled(scale=scale))
            self._open, self._optimizer, self._share = block, optimizer, 0.0

    def add(self, share: float) -> None:
        """The micro-batch under way is this share of a mean over an update of full length."""
        self._share += share

    def end(self) -> None:
        """After the last micro-batch."""
        block, self._open = self._open, None
        optimizer, self._optimizer, self.last = self._optimizer, None, False
        if block is None or optimizer is None:
            return
        block.close()
        if self._share and abs(self._share - 1) > 1e-9:
            make_whole(optimizer, self._share)

    def abandon(self, error: BaseException) -> None:
        """After a failure: the mean comes back, and nothing was gathered."""
        block, self._open = self._open, None
        self._optimizer, self.last = None, False
        if block is not None:
            block.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def part(
        self, optimizer: BayesianOptimizer, last: bool, scale: float | None = None, share: float = 0.0
    ) -> Iterator[None]:
        """One micro-batch. Without a `share` the losses of all add up to a mean, however many they are."""
        self.begin(optimizer, scale)
        self.add(share)
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise
        if last:
            self.end()


def make_whole(optimizer: BayesianOptimizer, share: float) -> None:
    """After a block whose losses were together this share of a mean: clipping finds the gradient of the mean."""
    gathered = optimizer._gathered
    if gathered.samples:
        gathered.share = share
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        torch._foreach_mul_(gradients, 1 / share)


def refuse_several_samples(optimizer: BayesianOptimizer) -> None:
    """Loops that run each batch once take one sample of the weights."""
    if optimizer.settings["mc_samples"] != 1 or optimizer.settings.get("accumulate", 1) != 1:
        raise UnsupportedOperation(
            "this loop runs each micro-batch once: mc_samples must be 1, and accumulate(n) is the loop's own number of "
            "micro-batches (gradient_accumulation_steps, accumulate_grad_batches). Several samples an update: "
            "mc_slices=K, each for its part of the batch."
        )


def unwrapped_optimizer(optimizer: object) -> BayesianOptimizer:
    """The credo optimiser inside the wrappers of other libraries."""
    found = optimizer
    while hasattr(found, "optimizer"):
        found = found.optimizer
    if not isinstance(found, BayesianOptimizer):
        raise InvalidValue(
            f"the optimizer is a {type(found).__name__} without a posterior. Give the loop one of credo's: "
            "credo.VOGN(model, data_size=len(data))"
        )
    return found


def draws(model: nn.Module, posterior: Posterior, samples: int, seed: int) -> list[dict[str, Tensor]]:
    """Weights by the model's own names."""
    names = ModelCopy(model)
    names.check(posterior.mean)
    generator = torch.Generator(posterior.device).manual_seed(seed)
    number = whole("samples", samples, at_least=1)
    drawn = names.placed(posterior.sample_many(generator, number))
    return [{name: tensor[k] for name, tensor in drawn.items()} for k in range(number)]


@contextmanager
def loaded(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these weights; with its own, bit for bit, afterwards."""
    own = dict(model.named_parameters())
    memory = {name: own[name].data for name in weights}
    try:
        for name, tensor in weights.items():
            own[name].data = tensor
        yield
    finally:
        for name, tensor in memory.items():
            own[name].data = tensor
