"""Nested state (dicts, lists, tuples, numbers, strings, tensors) as named tensors and JSON, and back, exactly.

Only these types are known, in both directions: nothing in a file can name a class or be executed.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credo.errors import InvalidType

# Marked containers; a plain dict never looks like one, since dicts are always packed as items.
TENSOR, ITEMS, TUPLE = "$tensor", "$items", "$tuple"


def pack(state: object) -> tuple[dict[str, Tensor], str]:
    """Tensors by number, and the JSON that says where each belongs."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_packed(state, tensors, "state"), separators=(",", ":"))


def _packed(value: object, tensors: dict[str, Tensor], where: str) -> object:
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {ITEMS: [[key, _packed(v, tensors, f"{where}[{key!r}]")] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_packed(v, tensors, f"{where}[{k}]") for k, v in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InvalidType(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold.")


def unpack(tensors: Mapping[str, Tensor], text: str) -> Any:
    return _unpacked(json.loads(text), tensors)


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    if mark == TENSOR:
        return tensors[content]
    if mark == TUPLE:
        return tuple(_unpacked(item, tensors) for item in content)
    return {key: _unpacked(item, tensors) for key, item in content}


def equal(one: object, other: object) -> bool:
    """Bitwise equality of two states; NaN equals itself."""
    mine, my_text = pack(one)
    others, text = pack(other)
    return my_text == text and all(_same_bits(tensor, others[name]) for name, tensor in mine.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
