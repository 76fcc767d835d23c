"""Which layers there are: the backward passes show them, and a rank without examples learns them from the others."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.distributed import World
from credo.errors import UnsupportedOperation
from credo.optim.gathered_factors import Expected


def layers_of_all(
    everybody: World, own: Sequence[Expected], parameters: Sequence[Tensor], names: Mapping[int, str]
) -> list[Expected]:
    """The layers that any rank has seen; all ranks must have seen a layer alike."""
    mine = {names[id(e.weight)]: _described(e, names) for e in own}
    found: dict[str, Any] = {}
    for rank, text in enumerate(everybody.gather_texts(json.dumps(mine))):
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
