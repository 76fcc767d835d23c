"""Whitespace-separated numbers, as the UCI regression sets and their standard splits are written."""

import numpy as np
import torch
from torch import Tensor

from credo.data.formats.bounds import damaged, refuse_empty_or_html


def parse_table(data: bytes, source: str) -> Tensor:
    """(rows, columns), float64; blank lines are skipped."""
    refuse_empty_or_html(data, source)
    try:
        rows = [
            [float(word) for word in line.split()]
            for line in data.decode("ascii").splitlines()
            if line.strip()
        ]
    except (ValueError, UnicodeDecodeError) as error:
        raise damaged(source, f"not a table of numbers: {error}", data) from error
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise damaged(source, f"rows have different numbers of columns: {sorted(widths)}", data)
    table = torch.from_numpy(np.array(rows))
    if not bool(torch.isfinite(table).all()):
        raise damaged(source, "not all numbers are finite", data)
    return table


def parse_indices(data: bytes, source: str, below: int) -> Tensor:
    """Whole numbers in 0..below − 1, each at most once; they may be written as 3.000e+00."""
    table = parse_table(data, source).flatten()
    indices = table.clamp(-1, 2**53).long()
    if not bool((indices == table).all()) or int(indices.min()) < 0 or int(indices.max()) >= below:
        raise damaged(source, f"indices must be whole numbers in 0..{below - 1}", data)
    if len(set(indices.tolist())) != len(indices):
        raise damaged(source, "an index occurs twice", data)
    return indices
