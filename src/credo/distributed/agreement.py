"""What ranks must have in common: an optimiser, the mean it begins with, the layers that have Kronecker factors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.distributed.sharding import Reducer
from credo.distributed.world import World, agree, world
from credo.errors import UnsupportedOperation


def synchronise_start(optimizer: Optimizer, module: nn.Module | None, reducer: Reducer) -> None:
    """Compares names, shapes, dtypes and settings over the ranks, and takes over rank 0's parameters and buffers.

    Parameters that lie on the ranks in parts are one already.
    """
    own = world()
    if own.alone:
        return
    synchronised = _synchronised(module)
    agree(own, {**_facts(optimizer, reducer), "nn.SyncBatchNorm": synchronised})
    _refuse(synchronised)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [p.detach() for p in members if reducer.starts([p]) is None]
    buffers = [] if module is None else list(module.buffers())
    own.broadcast_([*parameters, *buffers])


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


def _facts(optimizer: Any, reducer: Reducer) -> dict[str, Any]:
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
            facts[f"parameter {names[id(p)]!r}"] = (tuple(reducer.shape_of(p)), str(p.dtype), p.requires_grad)
            if optimizer.settings.get("sharded"):
                facts[f"the order in memory of {names[id(p)]!r}"] = p.stride()
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in options.items():
            facts[f"{key} of group {k}"] = float(value) if isinstance(value, torch.Tensor) else value
    return facts


@dataclass(frozen=True)
class Expected:
    """A layer whose factors are due, also for a rank whose own share of the batch is empty."""

    weight: Tensor
    bias: Tensor | None
    inputs: torch.Size
    outputs: torch.Size


def layers_of_all(
    ranks: World, own: Sequence[Expected], parameters: Sequence[Tensor], names: Mapping[int, str]
) -> list[Expected]:
    """The layers that any rank has seen; all ranks must have seen a layer alike."""
    mine = {names[id(e.weight)]: _described(e, names) for e in own}
    found: dict[str, Any] = {}
    for rank, text in enumerate(ranks.gather_texts(json.dumps(mine))):
        for name, layer in json.loads(text).items():
            if found.setdefault(name, layer) != layer:
                raise UnsupportedOperation(
                    f"layer {name!r} is used in different ways on different ranks: {layer} on rank {rank}, "
                    f"{found[name]} on one before. All ranks must run the same model."
                )
    by_name = {names[id(p)]: p for p in parameters}
    return [
        Expected(
            by_name[name], None if bias is None else by_name[bias], torch.Size(inputs), torch.Size(outputs)
        )
        for name, (bias, inputs, outputs) in found.items()
    ]


def _described(layer: Expected, names: Mapping[int, str]) -> list[Any]:
    """Bias, and the shapes of the two factors."""
    bias = None if layer.bias is None else names[id(layer.bias)]
    return [bias, list(layer.inputs), list(layer.outputs)]
