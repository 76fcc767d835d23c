"""Tensors of every rank on every rank, bit for bit."""

import json
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from credo.distributed.world import World


def gather(world: World, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors of all ranks, by rank; their number, shapes and dtypes may differ from rank to rank.

    Two messages for all of them, what they are and their bytes. The results lie where the own tensors do.
    """
    if world.alone:
        return [list(tensors)]
    device = tensors[0].device if tensors else torch.device("cpu")
    labels = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    of_all = [json.loads(text) for text in world.gather_texts(json.dumps(labels))]
    rows = [_bytes(tensor) for tensor in tensors]
    data = world.gather_bytes(torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8))
    return [_tensors(row.to(device), theirs) for row, theirs in zip(data, of_all, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensors(data: Tensor, labels: list[tuple[list[int], str]]) -> list[Tensor]:
    dtypes = [getattr(torch, name) for _, name in labels]
    sizes = [prod(shape) * dtype.itemsize for (shape, _), dtype in zip(labels, dtypes, strict=True)]
    return [
        part.clone().view(dtype).reshape(shape)  # a copy, which begins where the dtype may begin
        for part, dtype, (shape, _) in zip(torch.split(data, sizes), dtypes, labels, strict=True)
    ]
