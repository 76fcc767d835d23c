"""The slow, obvious truth: one example at a time, by plain torch."""

import torch
from torch import Tensor, nn


def target_for(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = first(model(x))
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)


def first(out):
    """The tensor of an output that may be a tuple."""
    return out if isinstance(out, Tensor) else out[0]


def mean_loss(out, target: Tensor) -> Tensor:
    """A loss that is not symmetric in its outputs, averaged over examples."""
    error = first(out) - target
    return (error.square() + 0.3 * error.sin()).flatten(1).sum(1).mean()


def squares_by_loop(model: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Σᵢ gᵢ² from a loop over batches of one."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        loss = mean_loss(model(x[i : i + 1]), target[i : i + 1])
        wanted = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        for name, grad in zip(sums, grads, strict=True):
            sums[name] += 0 if grad is None else grad.square()
    return sums


def plain_backward(model: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradients without credo; leaves no `.grad` behind."""
    model.zero_grad()
    loss = mean_loss(model(x), target)
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Of the norm; a truth that is nothing but rounding (a norm over one number, say) counts as zero."""
    return float((value - truth).norm() / truth.norm().clamp_min(1e-12))
