"""Buffers beside the weights: running statistics and the like, without which the weights predict something else."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from credo.errors import InvalidType


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """By name, those that `state_dict` has; others are made again with the module."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def frozen_parameters(module: nn.Module, uncertain: Collection[str]) -> dict[str, Tensor]:
    """By name, those without a gradient that are not among the weights of a posterior."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad and n not in uncertain}


def owned_buffers(source: object, uncertain: Collection[str] = ()) -> dict[str, Tensor]:
    """Detached copies, of any dtype."""
    found = source
    if isinstance(source, nn.Module):
        found = persistent_buffers(source) | frozen_parameters(source, uncertain)
    if not isinstance(found, Mapping) or not all(
        isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()
    ):
        raise InvalidType(f"buffers must be a module, or map names to tensors; got {type(source).__name__}")
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }


def untrained_statistics(model: nn.Module) -> str | None:
    """The first normalisation layer that has never seen a batch in training mode, if any."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None:
            statistics = module.running_mean, module.running_var
            if int(module.num_batches_tracked) == 0 and _as_made(*statistics):
                return name or type(module).__name__
    return None


def _as_made(mean: Tensor | None, variance: Tensor | None) -> bool:
    return mean is not None and variance is not None and not bool(mean.any()) and bool((variance == 1).all())
