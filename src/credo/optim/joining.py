"""How an optimiser enters a world of processes: all must be alike, and all begin with rank 0's mean."""

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from credo.distributed import agree, world
from credo.errors import UnsupportedOperation


def join(optimizer: Optimizer, module: nn.Module | None) -> None:
    """Compares names, shapes, dtypes and settings over the ranks, and takes over rank 0's parameters and buffers."""
    everybody = world()
    if everybody.alone:
        return
    synchronised = _synchronised(module)
    agree(everybody, {**_facts(optimizer), "nn.SyncBatchNorm": synchronised})
    _refuse(synchronised)
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    buffers = [] if module is None else list(module.buffers())
    everybody.broadcast_([*parameters, *buffers])


def _synchronised(module: nn.Module | None) -> list[str]:
    named = [] if module is None else module.named_modules()
    return [name or "the model" for name, part in named if isinstance(part, nn.SyncBatchNorm)]


def _refuse(synchronised: list[str]) -> None:
    """Their backward pass is a function of torch's own that asks the other ranks: no example's gradient by itself."""
    if synchronised:
        raise UnsupportedOperation(
            f"no gradients of single examples through nn.SyncBatchNorm ({', '.join(synchronised)}), whose statistics "
            "are of all ranks' examples. Leave out convert_sync_batchnorm: nn.BatchNorm takes each rank's own share, "
            "and credo.distributed.average_buffers(model) makes the running statistics one before evaluation; or take "
            "nn.GroupNorm or nn.LayerNorm."
        )


def _facts(optimizer: Any) -> dict[str, Any]:
    """What must be the same on all ranks, in the order in which a difference is told."""
    own = import_module("credo").__version__  # by name: no layer imports the package that gathers them all
    facts: dict[str, Any] = {
        "the version of credo": own,
        "the version of torch": torch.__version__,
        "the method": type(optimizer).__name__,
        **optimizer.settings,
    }
    names = optimizer.names()
    for k, group in enumerate(optimizer.param_groups):
        facts[f"the number of parameters in group {k}"] = len(group["params"])
        for p in group["params"]:
            facts[f"parameter {names[id(p)]!r}"] = (tuple(p.shape), str(p.dtype), p.requires_grad)
            if optimizer.settings.get("sharded"):
                facts[f"the order in memory of {names[id(p)]!r}"] = p.stride()
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in options.items():
            facts[f"{key} of group {k}"] = float(value) if isinstance(value, torch.Tensor) else value
    return facts
