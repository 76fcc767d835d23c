"""Lists of tensors as the programs read them: one table of whole numbers and one of numbers, on the device.

A table that was seen before is on the device already. A new one goes there from pinned memory, without a wait.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.kernels import tensors
from credo.kernels.tensors import Row
from credo.kernels.triton.launching import blocks, power

BLOCK = 1024  # elements a program
LIMIT = 128  # tables that are remembered
HOW = {"num_warps": 8, "enable_fp_fusion": False}  # rounded as on the CPU; memory is what takes the time
MANY = 4096  # tensors: each program looks at the first blocks of all of them
WIDE = (torch.float32, torch.float64)
_known: dict[tuple[torch.device, int, torch.dtype, tuple[float, ...]], Tensor] = {}


class ListTable(NamedTuple):
    """What the programs of `programs/lists.py` want to know of a list."""

    place: Tensor  # (rows, length) int64
    length: int
    programs: int
    constants: dict[str, Any]  # the type of the elements, and how they are cut


def table(rows: Sequence[Row | None], *columns: Sequence[int]) -> ListTable | None:
    """Of rows of tensors, with further whole numbers of each tensor before the addresses; None if not for them.

    They want all tensors on one device, of one type, float32 or float64, and the elements of each parameter's tensors
    in the same order without gaps.
    """
    present = [row for row in rows if row is not None]
    first = present[0][0]
    device, dtype, numels = first.device, first.dtype, [tensor.numel() for tensor in present[0]]
    if dtype not in WIDE or len(numels) > MANY:
        return None
    for row in present:
        if any(t.device != device or t.dtype is not dtype for t in row) or [t.numel() for t in row] != numels:
            return None
    if not tensors.aligned(*present):
        return None
    programs = [blocks(size, BLOCK) for size in numels]
    starts, count = [0, *accumulate(programs)], len(numels)
    addresses = [[0] * count if row is None else [t.data_ptr() for t in row] for row in rows]
    flat = (*starts[:-1], *numels, *(n for own in (*columns, *addresses) for n in own))
    aligned = all(address % 16 == 0 for own in addresses for address in own)
    constants = {"T": dtype, "ALIGNED": aligned, "BLOCK": BLOCK, "TENSORS": power(count, 1, MANY), **HOW}
    return ListTable(on_device(flat, device, torch.int64), count, starts[-1], constants)


def on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A row of numbers on a device, for the stream that is in use there."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = device, stream, dtype, values
    if (known := _known.get(key)) is not None:
        return known
    while len(_known) >= LIMIT:
        del _known[next(iter(_known))]
    row = torch.tensor(values, dtype=dtype)
    _known[key] = row if device.type == "cpu" else row.pin_memory().to(device, non_blocking=True)
    return _known[key]
