"""What a Training names, built: the model, the data, and the schedules of learning rate and tempering."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo import data
from credo.data.augmentation import Augmentation
from credo.data.examples import Examples, Normalise, Splits
from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import checked_options
from credo.experiments.names import known
from credo.experiments.recipe import Setting, Training
from credo.models import MLP, AlexNet, LeNet5, ResNet18, ResNet20, xavier_normal_
from credo.optim import TemperingSchedule

# The model, cut to the data: classes, channels and image size follow from the examples

Shape = tuple[int, ...]  # of one example


def lenet5(shape: Shape, outputs: int, *, dropout: float = 0.0) -> nn.Module:
    return LeNet5(outputs, in_channels=shape[0], image_size=shape[-1], dropout=dropout)


def alexnet(shape: Shape, outputs: int, *, width: int = 64, dropout: float = 0.0) -> nn.Module:
    return AlexNet(outputs, in_channels=shape[0], width=width, dropout=dropout)


def resnet18(
    shape: Shape,
    outputs: int,
    *,
    width: int = 64,
    stem: str = "cifar",
    dropout: float = 0.0,
    batch_norm: bool = True,
) -> nn.Module:
    channels = shape[0]
    return ResNet18(
        outputs,
        stem=stem,  # type: ignore[arg-type]
        width=width,
        in_channels=channels,
        dropout=dropout,
        batch_norm=batch_norm,
    )


def resnet20(shape: Shape, outputs: int, *, width: int = 16, dropout: float = 0.0) -> nn.Module:
    return ResNet20(outputs, width=width, in_channels=shape[0], dropout=dropout)


def mlp(shape: Shape, outputs: int, *, width: int = 100, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """`layers` hidden layers of `width` units; images are flattened."""
    return MLP((math.prod(shape), *[width] * layers, outputs), dropout=dropout)


NETWORKS: Final[dict[str, Callable[..., nn.Module]]] = {
    "lenet5": lenet5,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "mlp": mlp,
}
# xavier-normal initialisation, as in the released code; and how many outputs, if not one for each class of the data
FOR_ALL: Final[Mapping[str, Setting]] = {"xavier": False, "num_classes": 0}


def options_of(name: str) -> dict[str, object]:
    """The options of a registered model, with their defaults."""
    parameters = inspect.signature(NETWORKS[known("model", name, NETWORKS)]).parameters
    return {**{k: p.default for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}, **FOR_ALL}


def build_model(training: Training, shape: Shape, outputs: int) -> nn.Module:
    """Weights come from torch's global generator, which the caller has forked and seeded."""
    if isinstance(training.model, str):
        options = checked_options("model_options", training.model_options, options_of(training.model))
        xavier, classes = options.pop("xavier", False), options.pop("num_classes", 0)
        model = NETWORKS[training.model](shape, classes or outputs, **options)
        if xavier:
            xavier_normal_(model)
        return model
    built: object = training.model(**training.model_options)
    if not isinstance(built, nn.Module):
        raise InvalidType(f"model must return a torch.nn.Module, got {type(built).__name__}.")
    return built


# The data: the recipe's subsets, the classes held out, and what counts as unfamiliar

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


# The schedules: functions of the step alone, so that a resumed run cannot get them wrong


@dataclass(frozen=True)
class LearningRate:
    """Linear from `start` to `peak` over the warm-up (gradual warm-up), then × `decay` at each milestone.

    With `cosine_end` also × ½(1 + cos πt), t from 0 at the end of the warm-up to 1 at that step.
    """

    peak: float
    start: float
    warmup: float  # steps
    milestones: tuple[int, ...]  # steps
    decay: float
    cosine_end: int | None = None  # step

    def at(self, step: int) -> float:
        """α of the step that comes after `step` steps."""
        passed = sum(step >= milestone for milestone in self.milestones)
        scale = self.decay**passed
        if step >= self.warmup:
            return self.peak * scale * self._cosine(step)
        return (self.start + (self.peak - self.start) * step / self.warmup) * scale

    def _cosine(self, step: int) -> float:
        if self.cosine_end is None:
            return 1.0
        passed = (step - self.warmup) / (self.cosine_end - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(passed, 1.0)))

    def set(self, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.at(step)


def learning_rate(training: Training, optimizer: Optimizer, steps_per_epoch: int) -> LearningRate:
    """Milestones and warm-up are counted in epochs in a recipe, in steps from here on."""
    return LearningRate(
        peak=float(optimizer.defaults["lr"]),
        start=training.warmup_from,
        warmup=training.warmup_epochs * steps_per_epoch,
        milestones=tuple(epoch * steps_per_epoch for epoch in training.milestones),
        decay=training.decay,
        cosine_end=training.epochs * steps_per_epoch if training.cosine else None,
    )


def tempering(training: Training, optimizer: Optimizer, steps_per_epoch: int) -> TemperingSchedule | None:
    """τ linear from `tempering_from` to settings["tempering"] over `tempering_epochs`; None if it is constant."""
    if training.tempering_from is None:
        return None
    if "tempering" not in optimizer.param_groups[0]:
        raise InvalidValue(
            f"tempering_from={training.tempering_from} is for methods with a tempering; {training.method!r} has none."
        )
    steps = round(training.tempering_epochs * steps_per_epoch)
    if steps < 1:
        raise InvalidValue(f"tempering_epochs must be above 0, got {training.tempering_epochs!r}.")
    return TemperingSchedule(
        optimizer, start=training.tempering_from, end=optimizer.defaults["tempering"], steps=steps
    )
