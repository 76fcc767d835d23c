"""The data of a run: the recipe's subsets, the classes held out, and what counts as unfamiliar."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from credo import data
from credo.data.augmentation import Augmentation
from credo.data.examples import Examples, Normalise, Splits
from credo.errors import InvalidType, InvalidValue
from credo.experiments.recipe import Training

HELD_OUT = "held_out"


@dataclass(frozen=True)
class RunData:
    """What a run trains on, what it is tested on, and what it should find strange."""

    train: Examples
    test: Examples
    ood: dict[str, Examples]
    classes: tuple[str, ...]
    normalise: Normalise
    augmentation: Augmentation | None
    validation: Examples | None = None  # where the recipe keeps some of the training set for it
    target_mean: float = 0.0  # of a regression whose targets were standardised
    target_std: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example as the model sees it."""
        first, _ = self.train.gather(torch.zeros(1, dtype=torch.int64))
        return tuple(self.normalise(first).shape[1:])

    @property
    def outputs(self) -> int:
        """One a class; for regression one a target value."""
        if self.train.targets.is_floating_point():
            return self.train.targets[0].numel()
        return len(self.classes) or int(self.train.targets.max()) + 1


def run_data(training: Training, root: Path | None) -> RunData:
    splits = splits_of(training, root)
    train, test = splits.train, splits.test
    ood = {name: data.load(name, root).test for name in training.ood}
    classes = splits.classes
    if training.held_out_classes:
        kept = _kept_classes(training, splits)
        ood = {HELD_OUT: test.subset(_where(test, kept, False)), **ood}
        train, test = (_relabelled(part.subset(_where(part, kept, True)), kept) for part in (train, test))
        classes = tuple(classes[k] for k in kept) if classes else ()
    if training.augment and splits.augmentation is None:
        raise InvalidValue(f"augment=True, and {splits.name!r} has no augmentation. Give its Splits one.")
    validation = None
    if training.validation_size is not None:
        if training.validation_size >= len(train):
            raise InvalidValue(
                f"validation_size={training.validation_size} must be below the {len(train)} training examples."
            )
        train, validation = train.hold_out(training.validation_size)
    return RunData(
        _cut(train, training.train_size),
        _cut(test, training.test_size),
        {name: _cut(examples, training.test_size) for name, examples in ood.items()},
        classes,
        splits.normalise,
        splits.augmentation if training.augment else None,
        validation,
        splits.target_mean,
        splits.target_std,
    )


def splits_of(training: Training, root: Path | None) -> Splits:
    if isinstance(training.data, str):
        return data.load(training.data, root)
    splits: object = training.data()
    if not isinstance(splits, Splits):
        raise InvalidType(f"data must return credo.data.Splits, got {type(splits).__name__}.")
    return splits


def _cut(examples: Examples, size: int | None) -> Examples:
    return examples if size is None else examples.take(size)


def _kept_classes(training: Training, splits: Splits) -> list[int]:
    count = len(splits.classes) or int(splits.train.targets.max()) + 1
    wrong = [k for k in training.held_out_classes if not 0 <= k < count]
    kept = [k for k in range(count) if k not in training.held_out_classes]
    if wrong or len(kept) < 2:
        raise InvalidValue(
            f"held_out_classes={training.held_out_classes} must lie in 0..{count - 1} and leave at least two classes."
        )
    return kept


def _where(examples: Examples, kept: list[int], inside: bool) -> Tensor:
    chosen = torch.isin(examples.targets, torch.tensor(kept, device=examples.targets.device))
    return (chosen if inside else ~chosen).nonzero().flatten()


def _relabelled(examples: Examples, kept: list[int]) -> Examples:
    """The classes that are left, numbered from 0 without gaps."""
    return Examples(examples.inputs, torch.bucketize(examples.targets, torch.tensor(kept)))
