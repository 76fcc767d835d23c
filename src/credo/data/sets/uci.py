"""UCI regression with the standard splits of Hernández-Lobato & Adams: data.txt, index_*.txt."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from credo.data.examples import Examples, Splits
from credo.data.verify import Folder, check_content, damaged


def parse_table(data: bytes, source: str) -> Tensor:
    """(rows, columns), float64; blank lines are skipped."""
    check_content(data, source)
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


NAMES = (
    "bostonHousing", "concrete", "energy", "kin8nm", "naval-propulsion-plant", "power-plant",
    "protein-tertiary-structure", "wine-quality-red", "yacht",
)  # fmt: skip


@dataclass(frozen=True)
class UciSet:
    """One split. Features and targets are standardised with the means and deviations of the training half."""

    name: str
    split: int = 0

    def __call__(self, folder: Folder) -> Splits:
        table = parse_table(folder.read("data.txt"), folder.where("data.txt"))
        features = table[:, self._indices(folder, "index_features.txt", table.shape[1])]
        targets = table[:, self._indices(folder, "index_target.txt", table.shape[1])]
        train, test = (
            self._indices(folder, f"index_{half}_{self.split}.txt", len(table)) for half in ("train", "test")
        )
        if both := set(train.tolist()) & set(test.tolist()):
            name = f"index_test_{self.split}.txt"
            raise damaged(folder.where(name), f"{len(both)} rows are in both halves", folder.read(name))
        x_mean, x_std = moments(features[train])
        y_mean, y_std = moments(targets[train])
        x, y = ((features - x_mean) / x_std).float(), ((targets - y_mean) / y_std).float()
        return Splits(
            self.name,
            Examples(x[train], y[train]),
            Examples(x[test], y[test]),
            target_mean=float(y_mean[0]),
            target_std=float(y_std[0]),
        )

    def _indices(self, folder: Folder, name: str, below: int) -> Tensor:
        return parse_indices(folder.read(name), folder.where(name), below)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column; 1 for one that never varies."""
    std = values.std(0, correction=0)
    return values.mean(0), torch.where(std > 0, std, 1.0)
