"""CIFAR-10 in its binary version (records of 1 + 3072 bytes) and in its python version (pickled dicts)."""

import numpy as np
import torch
from torch import Tensor

from credo.data.formats.bounds import damaged, refuse_empty_or_html
from credo.data.formats.pickled import parse_pickle

CLASSES = 10
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS


def parse_binary(data: bytes, source: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64."""
    refuse_empty_or_html(data, source)
    count, rest = divmod(len(data), RECORD)
    if rest:
        nearest = RECORD * (count + 1)
        why = (
            f"truncated or too long: {RECORD} bytes a record, {nearest} would be whole, {rest} are left over"
        )
        raise damaged(source, why, data)
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, RECORD)
    labels = records[:, 0].long()
    _check_labels(labels, source, data)
    return records[:, 1:].reshape(count, *SHAPE), labels


def parse_python(data: bytes, source: str) -> tuple[Tensor, Tensor]:
    """The same from a pickled batch, of which nothing is executed."""
    refuse_empty_or_html(data, source)
    batch = parse_pickle(data, source)
    if not isinstance(batch, dict):
        raise damaged(source, f"a batch is a dict, this is a {type(batch).__name__}", data)
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = fields.get("data"), fields.get("labels")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        raise damaged(source, f"'data' must be a uint8 array of shape (n, {PIXELS})", data)
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(k) is int for k in labels):
        raise damaged(source, f"'labels' must be a list of {len(pixels)} integers", data)
    if not labels or not all(0 <= k < CLASSES for k in labels):
        raise damaged(source, f"labels must lie in 0..{CLASSES - 1}, and there must be some", data)
    return torch.from_numpy(pixels.reshape(-1, *SHAPE).copy()), torch.tensor(labels)


def parse_classes(data: bytes, source: str) -> tuple[str, ...]:
    """batches.meta.txt: ten names, one a line."""
    refuse_empty_or_html(data, source)
    try:
        names = tuple(data.decode("ascii").split())
    except UnicodeDecodeError as error:
        raise damaged(source, "the names of the classes must be ASCII text", data) from error
    if len(names) != CLASSES or len(set(names)) != CLASSES:
        raise damaged(source, f"{CLASSES} different names of classes expected, {len(set(names))} found", data)
    return names


def _check_labels(labels: Tensor, source: str, data: bytes) -> None:
    if int(labels.max()) >= CLASSES:
        raise damaged(source, f"label {int(labels.max())} is outside 0..{CLASSES - 1}", data)
