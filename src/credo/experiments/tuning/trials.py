"""One trial: the training of `credo run` on the training part, judged by the NLL of the validation part."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from credo.data.augmentation import Augmentation
from credo.data.batches import Batches
from credo.data.examples import Examples, Splits
from credo.errors import InvalidType, InvalidValue, NonFiniteError
from credo.experiments.build import RunData, build_model, learning_rate, run_data, splits_of, tempering
from credo.experiments.learners import BatchLearner, Material
from credo.experiments.methods import method_of
from credo.experiments.overrides import check_seed, whole_number
from credo.experiments.recipe import Training
from credo.experiments.state import private_randomness
from credo.experiments.tasks import Predicted, PredictionTask, task_of
from credo.experiments.train import settings_with_augmentation
from credo.optim.arguments import number
from credo.predict.functions import AnyPosterior

# What a trial trains and is judged on: batches for training, and validation examples that are no training data

CHUNK: Final = 500  # validation examples at a time
CUT_SEED: Final = 0xC07  # the same examples are cut off for every method
Own: TypeAlias = tuple[Tensor, Tensor] | Examples | Iterable[Any]  # tensors, examples, or batches of a loader


class DataSource(ABC):
    """Training batches, epoch by epoch, and the validation data."""

    data_size: int  # N
    shape: tuple[int, ...]  # of one example; empty where it is not known
    outputs: int
    augmentation: Augmentation | None = None

    @abstractmethod
    def steps(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def begin(self, seed: int, device: torch.device) -> "Iterable[tuple[Tensor, Tensor]]":
        """For one trial: each pass over it is an epoch. Every trial sees the same batches."""

    @abstractmethod
    def material(self, task: PredictionTask, seed: int, device: torch.device) -> Material:
        """For what makes a posterior of the weights after training."""

    @abstractmethod
    def predict(
        self,
        task: PredictionTask,
        model: nn.Module,
        posterior: AnyPosterior,
        samples: int,
        seed: int,
        device: torch.device,
    ) -> Predicted:
        """On the validation data; their `targets` among it."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """For the identity of a study."""


@final
class ExampleSource(DataSource):
    """Examples in memory (or lazy ones), in the batches that `credo run` would make of them; `test` is validation."""

    def __init__(self, data: RunData, batch_size: int) -> None:
        self._data, self._batch_size = data, batch_size
        self.data_size, self.shape, self.outputs = len(data.train), data.shape, data.outputs
        self.augmentation = data.augmentation

    def steps(self) -> int:
        return -(-self.data_size // self._batch_size)

    def begin(self, seed: int, device: torch.device) -> Batches:
        data = self._data
        return Batches(
            data.train,
            self._batch_size,
            shuffle=True,
            seed=seed,
            augmentation=data.augmentation,
            normalise=data.normalise,
            device=device,
        )

    def material(self, task: PredictionTask, seed: int, device: torch.device) -> Material:
        data = self._data

        def batches(part: Examples, shuffle: bool) -> Batches:
            how = {"shuffle": shuffle, "normalise": data.normalise, "device": device}
            return Batches(part, self._batch_size, seed=seed, **how)  # type: ignore[arg-type]

        return Material(lambda: batches(data.train, True), lambda: batches(data.test, False), task, seed)

    def predict(
        self,
        task: PredictionTask,
        model: nn.Module,
        posterior: AnyPosterior,
        samples: int,
        seed: int,
        device: torch.device,
    ) -> Predicted:
        validation, normalise = self._data.test, self._data.normalise
        batches = Batches(validation, CHUNK, shuffle=False, normalise=normalise, device=device)
        found = task.predict(model, posterior, (inputs for inputs, _ in batches), samples, seed)
        return {**found, "targets": validation.targets.cpu()}

    def described(self) -> dict[str, Any]:
        parts = {"training": self._data.train, "validation": self._data.test}
        return {name: [len(part), fingerprint(part)] for name, part in parts.items()}


@final
class LoaderSource(DataSource):
    """The user's own loaders of (inputs, targets): a `DataLoader`, or any object to iterate over anew."""

    def __init__(self, train: Iterable[Any], validation: Iterable[Any], data_size: int) -> None:
        self._train, self._validation = train, validation
        self.data_size, self.shape, self.outputs = data_size, (), 0
        self._generators = [
            (generator, generator.get_state())
            for part in (train, validation)
            for generator in generators(part)
        ]

    def steps(self) -> int:
        return len(self._train)  # type: ignore[arg-type]

    def begin(self, seed: int, device: torch.device) -> "Iterable[tuple[Tensor, Tensor]]":
        for generator, state in self._generators:  # as they were before the first trial
            generator.set_state(state)
        return PlacedBatches(self._train, device)

    def material(self, task: PredictionTask, seed: int, device: torch.device) -> Material:
        train, validation = (PlacedBatches(part, device) for part in (self._train, self._validation))
        return Material(lambda: train, lambda: validation, task, seed)

    def predict(
        self,
        task: PredictionTask,
        model: nn.Module,
        posterior: AnyPosterior,
        samples: int,
        seed: int,
        device: torch.device,
    ) -> Predicted:
        targets: list[Tensor] = []

        def inputs() -> Iterator[Tensor]:
            for x, y in PlacedBatches(self._validation, device):
                targets.append(y.cpu())
                yield x

        found = task.predict(model, posterior, inputs(), samples, seed)
        return {**found, "targets": torch.cat(targets)}

    def described(self) -> dict[str, Any]:
        return {"training": [self.data_size, len(self._train)], "validation": len(self._validation)}  # type: ignore[arg-type]


class PlacedBatches:
    """The batches of a loader, on the device."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise InvalidType(f"a loader must give pairs (inputs, targets), got {type(batch).__name__}.")
            yield batch[0].to(self._device), batch[1].to(self._device)


def generators(loader: object) -> list[torch.Generator]:
    """What a DataLoader draws its order from, if not from torch's global generator."""
    holders = (loader, getattr(loader, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def fingerprint(examples: Examples) -> str:
    """Changes where the data do; inputs that are read only when asked for are left out."""
    digest = hashlib.sha256()
    for part in (examples.inputs, examples.targets):
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


# For a row of a recipe, and for data of one's own


def source_of_row(training: Training, root: Path | None, fraction: float) -> ExampleSource:
    """A part of the data set's training half is kept for validation, before the row's own sizes are cut.

    So a row that trains on the first 300 images still does, and is judged on others. The test half is left alone.
    """
    splits = splits_of(training, root)
    train, validation = cut(splits.train, fraction)
    without_test = replace(splits, train=train, test=validation)
    data = run_data(replace(training, data=lambda: without_test, ood=()), root)
    return ExampleSource(data, training.batch_size)


def source_of_own(
    data: Own, validation: Own | None, fraction: float | None, data_size: int | None, training: Training
) -> DataSource:
    if (validation is None) == (fraction is None):
        what = "both are" if fraction is not None else "neither is"
        raise InvalidValue(
            "validation data decide which trial is best: give validation=(x, y) or a loader, or "
            f"validation_fraction=0.2 to cut them off the training data; here {what} given. The test data are for the "
            "end, not for this."
        )
    examples = examples_of("data", data)
    if examples is None:
        return _of_loaders(data, validation, data_size)
    if fraction is not None:
        train, held = cut(examples, fraction)
    else:
        other = examples_of("validation", validation)
        if other is None:
            raise InvalidType("data are tensors, so validation must be (inputs, targets) too, not a loader.")
        train, held = examples, other
    for name, part in (("data", train), ("validation", held)):
        if not len(part):
            raise InvalidValue(f"{name} has no examples; at least one is needed.")
    splits = Splits("own", train, held)
    return ExampleSource(run_data(replace(training, data=lambda: splits), None), training.batch_size)


def _of_loaders(data: Any, validation: Any, data_size: int | None) -> LoaderSource:
    if validation is None:
        raise InvalidValue(
            "a loader cannot be cut by validation_fraction: give a second loader as validation=."
        )
    if examples_of("validation", validation) is not None:
        raise InvalidType("data is a loader, so validation must be a loader too, not tensors.")
    loaders: tuple[tuple[str, Any], ...] = (("data", data), ("validation", validation))
    for name, loader in loaders:
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator) or not hasattr(loader, "__len__"):
            raise InvalidType(
                f"{name} must be (inputs, targets), credo.data.Examples, or a loader that has a length and can be "
                f"iterated over anew, got {type(loader).__name__}."
            )
        if len(loader) == 0:  # type: ignore[arg-type]
            raise InvalidValue(f"{name} is a loader without batches; at least one is needed.")
    size = len(data.dataset) if data_size is None and hasattr(data, "dataset") else data_size
    if size is None:
        raise InvalidValue("data_size, the number of training examples, must be given with this loader.")
    return LoaderSource(data, validation, size)


def examples_of(name: str, given: Any) -> Examples | None:
    """None for a loader."""
    if isinstance(given, Examples):
        return given
    if isinstance(given, tuple | list) and all(isinstance(part, Tensor) for part in given):
        if len(given) != 2:
            raise InvalidValue(f"{name} must be a pair (inputs, targets), got {len(given)} tensors.")
        return Examples(*given)
    return None


def cut(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Training and validation; which examples go where is always the same."""
    number("validation_fraction", fraction, 0, 1, open_low=True, open_high=True)
    held = round(fraction * len(examples))
    if not 0 < held < len(examples):
        raise InvalidValue(
            f"validation_fraction={fraction:g} of {len(examples)} examples leaves {len(examples) - held} for training "
            f"and {held} for validation; both need at least one."
        )
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(CUT_SEED))
    return examples.subset(order[held:]), examples.subset(order[:held])


# The trial

REPORTS: Final = 20  # of a trial at most: an epoch may be as short as a write to the disk
Scores: TypeAlias = Mapping[str, float]
Report: TypeAlias = Callable[[int, Scores], None]


@dataclass(frozen=True)
class Problem:
    """What all trials of a study have in common; `training` holds the defaults."""

    training: Training
    source: DataSource
    seed: int
    device: torch.device
    seeds: int = 1  # how many a trial is trained with: `seed` and those after it

    def __post_init__(self) -> None:
        check_seed(self.seed)
        whole_number("seeds", self.seeds, 1)

    def reported(self) -> list[int]:
        """Epochs after which the validation data are predicted: the last always."""
        epochs = self.training.epochs
        every = math.ceil(epochs / REPORTS)
        return sorted({*range(every, epochs + 1, every), epochs})

    def learner(self, training: Training, seed: int) -> tuple[torch.nn.Module, BatchLearner]:
        """Fresh, as the seed has it; to be called with torch's global generator forked."""
        source = self.source
        model = build_model(training, source.shape, source.outputs).to(self.device)
        task = task_of(training)
        settings = settings_with_augmentation(training, source)
        method = method_of(training.method)
        return model, method.build(model, task, data_size=source.data_size, seed=seed, settings=settings)


def run_trial(problem: Problem, training: Training, report: Report) -> Scores:
    """The means of the last validation scores over the seeds. NonFiniteError if one diverges.

    `report(epoch, scores)` may raise to end the trial; it is called for the first seed.
    """
    first = train_once(problem, training, problem.seed, report)
    later = range(problem.seed + 1, problem.seed + problem.seeds)
    found = [first, *[train_once(problem, training, seed, lambda *_: None) for seed in later]]
    return {name: mean(scores[name] for scores in found) for name in first}


def train_once(problem: Problem, training: Training, seed: int, report: Report) -> Scores:
    source, device = problem.source, problem.device
    task = task_of(training)
    scores: Scores = {}
    with private_randomness(seed, device):
        batches = source.begin(seed, device)
        model, learner = problem.learner(training, seed)
        rate = learning_rate(training, learner.optimizer, source.steps())
        temper = tempering(training, learner.optimizer, source.steps())
        step, reported = 0, set(problem.reported())
        for epoch in range(1, training.epochs + 1):
            model.train()
            for inputs, targets in batches:
                rate.set(learner.optimizer, step)
                learner.train_batch(inputs, targets)
                if temper is not None:
                    temper.step()
                step += 1
            learner.epoch_ended(epoch)
            if epoch == training.epochs:
                learner.conclude(source.material(task, seed, device))
            if epoch in reported:
                found = source.predict(task, model, learner.posterior(), training.samples, seed, device)
                if not all(bool(value.isfinite().all()) for value in found.values()):
                    raise NonFiniteError(
                        f"the prediction for the validation data is not finite after epoch {epoch}."
                    )
                scores = {**task.scores(found, found["targets"]), "nll_error": standard_error(found)}
                if math.isfinite(scores["nll"]):
                    report(epoch, scores)
    if not math.isfinite(scores["nll"]):
        raise NonFiniteError(f"the validation NLL is {scores['nll']}: some true class has probability 0.")
    return scores


def standard_error(prediction: Predicted) -> float:
    """Of the mean NLL over these examples; NaN for a single one."""
    targets = prediction["targets"]
    if "probs" in prediction:
        losses = -prediction["probs"].double().gather(1, targets[:, None])[:, 0].log()
    else:
        centre, variance = prediction["mean"].double().flatten(1), prediction["variance"].double().flatten(1)
        squares = (centre - targets.reshape(centre.shape).double()).square()
        losses = 0.5 * (squares / variance + variance.log()).sum(1)
    return float(losses.std() / math.sqrt(len(losses))) if len(losses) > 1 else math.nan
