"""Streams of tasks made from one data set: permuted pixels, or classes in pairs."""

from collections.abc import Callable

import torch
from torch import Tensor

from credo.continual import Task
from credo.data import Splits
from credo.errors import InvalidType, InvalidValue


def permuted(splits: Splits, tasks: int, seed: int) -> list[Task]:
    """Each task is the whole data set with its own permutation of the pixels; the first is not permuted."""
    (x, y), (x_test, y_test) = _pixels(splits)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(x.shape[1])]
    orders += [torch.randperm(x.shape[1], generator=generator) for _ in range(tasks - 1)]
    return [
        Task(f"permutation_{k}", x, y, x_test, y_test, transform=_permutation(order))
        for k, order in enumerate(orders)
    ]


def split(splits: Splits, tasks: int) -> list[Task]:
    """Task k tells the classes 2k and 2k + 1 apart, with a head of its own and labels 0 and 1."""
    (x, y), (x_test, y_test) = _pixels(splits)
    classes = int(y.max()) + 1
    if 2 * tasks > classes:
        raise InvalidValue(f"tasks={tasks} needs {2 * tasks} classes in pairs; {splits.name} has {classes}")
    found = []
    for k in range(tasks):
        rows, test_rows = y // 2 == k, y_test // 2 == k
        name = f"{2 * k}_or_{2 * k + 1}"
        found.append(
            Task(name, x[rows], y[rows] % 2, x_test[test_rows], y_test[test_rows] % 2, head=f"head_{k}")
        )
    return found


def _permutation(order: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda inputs: inputs[:, order]


def _pixels(splits: Splits) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train and test as rows of pixels in [0, 1] with their classes."""
    parts = []
    for part in (splits.train, splits.test):
        if not isinstance(part.inputs, Tensor):
            raise InvalidType(f"{splits.name} does not lie in memory; continual streams need tensors")
        pixels = part.inputs.flatten(1).float()
        parts.append((pixels / 255 if part.inputs.dtype == torch.uint8 else pixels, part.targets))
    return parts[0], parts[1]
