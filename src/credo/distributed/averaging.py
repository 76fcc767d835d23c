"""Gradients of torch's own optimisers, averaged over the ranks; credo's optimisers add up by themselves.

Rank r has M_r examples and the gradient g_r of its mean loss. All step with Σ M_r g_r / Σ M_r, the gradient of the
whole batch, in the same bits: one message a step, with counts and losses in it.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.distributed.world import agree, world


@final
class SharedGradients:
    """Ranks must have the same parameters and options, and begin with rank 0's weights and buffers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._world = world()
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        wide = any(p.dtype == torch.float64 for p in self._parameters)
        self._dtype = torch.float64 if wide else torch.float32
        if self._world.alone:
            return
        agree(self._world, _facts(model, optimizer))
        self._world.broadcast_([*(p.detach() for p in model.parameters()), *model.buffers()])

    def average(self, loss: Tensor | None, examples: int) -> Tensor:
        """`.grad` becomes that of the whole batch; returns its mean loss. Without a loss, this rank has no examples."""
        if self._world.alone:
            assert loss is not None  # alone, a batch has examples
            return loss
        numbers = [examples, 0.0 if loss is None else float(loss) * examples]
        there = [float(p.grad is not None) for p in self._parameters]
        flat = torch.cat(
            [self._row([*numbers, *there]), *(self._weighed(p, examples) for p in self._parameters)]
        )
        self._world.add_(flat)
        head, *sums = torch.split(flat, [2 + len(there), *(p.numel() for p in self._parameters)])
        total, losses, *anywhere = head.tolist()
        for p, summed, found in zip(self._parameters, sums, anywhere, strict=True):
            p.grad = (summed / total).view(p.shape).to(p.dtype) if found else None
        return torch.tensor(losses / total, dtype=torch.float64, device=self._parameters[0].device)

    def _weighed(self, p: Tensor, examples: int) -> Tensor:
        """Without examples, nothing: not even NaN · 0."""
        if p.grad is None or not examples:
            return self._row([0.0]).expand(p.numel())
        return p.grad.reshape(-1).to(self._dtype) * examples

    def _row(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=self._dtype, device=self._parameters[0].device)


def _facts(model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """What must be the same on all ranks, in the order in which a difference is told."""
    facts: dict[str, object] = {
        "the version of torch": torch.__version__,
        "the method": type(optimizer).__name__,
    }
    for name, p in model.named_parameters():
        facts[f"parameter {name!r}"] = (tuple(p.shape), str(p.dtype), p.requires_grad)
    for k, group in enumerate(optimizer.param_groups):
        facts[f"the options of group {k}"] = {key: value for key, value in group.items() if key != "params"}
    return facts
