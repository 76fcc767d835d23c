"""accelerate with a posterior (extra `hf`): its Accelerator, whose prepared optimisers keep credo's verbs.

    accelerator = Accelerator(gradient_accumulation_steps=4)        # from credo.integrations.accelerate
    model, optimizer, loader = accelerator.prepare(model, credo.VOGN(model, data_size=N), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            with optimizer.sampled():
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()                                        # or: optimizer.step(closure)
            optimizer.zero_grad()

All micro-batches of an update are at one weight sample and in one block, equal to one batch of all of them. accelerate
divides each loss by the number of micro-batches of a full update. Where the data end early, fewer of them or a smaller
last one count by their examples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

try:
    import accelerate  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError("credo.integrations.accelerate needs accelerate: pip install 'credo[hf]'") from error

from credo.integrations.updates import UpdateBlock
from credo.optim import BayesianOptimizer
from credo.posterior import Posterior


@final
class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's; optimisers with a posterior become `AcceleratedPosteriorOptimizer`s."""

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """accelerate's, for credo's optimisers with their verbs."""
        if isinstance(optimizer, BayesianOptimizer):
            place = self.device_placement if device_placement is None else device_placement
            optimizer = AcceleratedPosteriorOptimizer(optimizer, place, self.scaler)
            optimizer._is_accelerate_prepared = True
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """accelerate's; a last micro-batch that is smaller than the others counts less."""
        if self.gradient_accumulation_steps > 1 and (size := relative_size(self.gradient_state)) != 1:
            loss = loss * size
        super().backward(loss, **options)


def relative_size(state: Any) -> float:
    """Of the batch under way beside a full one: below 1 for the last of an epoch that does not divide.

    Among several processes accelerate makes the last batch a full one.
    """
    loader = state.active_dataloader
    if loader is None or not state.end_of_dataloader or state.remainder <= 0:
        return 1.0
    if accelerate.PartialState().num_processes > 1:
        return 1.0
    return float(state.remainder) / float(loader.total_batch_size)


@final
class AcceleratedPosteriorOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper, with `sampled`, `posterior` and `step(closure)`; all else is the optimiser's own.

    Under gradient accumulation `step(closure)` is called for every micro-batch, and the last one updates.
    """

    optimizer: BayesianOptimizer

    def __init__(self, optimizer: BayesianOptimizer, device_placement: bool, scaler: Any):
        self._block = UpdateBlock()
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """As the optimiser's; under accumulation it stays open until the last micro-batch of the update."""
        scale = None if self.scaler is None or not self.scaler.is_enabled() else self.scaler.get_scale()
        if self._micro_batches() == 1:
            with self.optimizer.sampled(scale=scale):
                yield
            return
        state = self.gradient_state
        share = relative_size(state) / self._micro_batches()
        with self._block.part(self.optimizer, state.sync_gradients, scale, share):
            yield

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update, at the last micro-batch."""
        if self._micro_batches() == 1 and self.scaler is None:
            return self.optimizer.step(closure)  # accelerate's does the same, and forgets the loss
        if closure is None or self._micro_batches() == 1:
            super().step(closure)
            return None
        with self.sampled():
            loss = closure()
        super().step()
        return loss.detach()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """accelerate's; inside a block gradients begin at none, and those of earlier micro-batches stay."""
        if not self._block:
            super().zero_grad(set_to_none)

    def posterior(self, **options: Any) -> Posterior:
        """The optimiser's."""
        return self.optimizer.posterior(**options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def _micro_batches(self) -> int:
        return int(self.gradient_state.num_steps)
