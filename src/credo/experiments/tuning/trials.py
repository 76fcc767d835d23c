"""One trial: the training of `credo run` on the training part, judged by the NLL of the validation part."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Final, TypeAlias

import torch

from credo.errors import NonFiniteError
from credo.experiments.checks import check_seed, whole_number
from credo.experiments.learners import Learner
from credo.experiments.methods import method_of
from credo.experiments.networks import build_model
from credo.experiments.recipe import Training
from credo.experiments.schedules import learning_rate, tempering
from credo.experiments.state import private_randomness
from credo.experiments.tasks import task_of
from credo.experiments.train import settings_with_augmentation
from credo.experiments.tuning.sources import Prediction, Source

REPORTS: Final = 20  # of a trial at most: an epoch may be as short as a write to the disk
Scores: TypeAlias = Mapping[str, float]
Report: TypeAlias = Callable[[int, Scores], None]


@dataclass(frozen=True)
class Problem:
    """What all trials of a study have in common; `training` holds the defaults."""

    training: Training
    source: Source
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

    def learner(self, training: Training, seed: int) -> tuple[torch.nn.Module, Learner]:
        """Fresh, as the seed has it; to be called with torch's global generator forked."""
        source = self.source
        model = build_model(training, source.shape, source.outputs).to(self.device)
        task = task_of(training.task, float(training.settings.get("noise_variance", 1.0)))
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
    task = task_of(training.task, float(training.settings.get("noise_variance", 1.0)))
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


def standard_error(prediction: Prediction) -> float:
    """Of the mean NLL over these examples; NaN for a single one."""
    targets = prediction["targets"]
    if "probs" in prediction:
        losses = -prediction["probs"].double().gather(1, targets[:, None])[:, 0].log()
    else:
        centre, variance = prediction["mean"].double().flatten(1), prediction["variance"].double().flatten(1)
        squares = (centre - targets.reshape(centre.shape).double()).square()
        losses = 0.5 * (squares / variance + variance.log()).sum(1)
    return float(losses.std() / math.sqrt(len(losses))) if len(losses) > 1 else math.nan
