"""`credo.predict`: the average of what the functions of a posterior say; the model is never touched."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Literal, overload

import torch
from torch import Tensor, nn

from credo.distributed import ALONE, World, gather, outcome_of_all, world_asked_for
from credo.errors import InvalidValue
from credo.posterior.model_copy import preserve_rng
from credo.predict.functions import AnyPosterior, Functions, functions_of
from credo.predict.inputs import Batch, Reader
from credo.predict.outputs import Likelihood, Noise, Task, likelihood_of
from credo.predict.prediction import (
    AnyPrediction,
    MultilabelPrediction,
    Outputs,
    Prediction,
    RegressionPrediction,
    first_examples,
    joined,
)
from credo.validate import whole


@overload
def predict(
    model: nn.Module,
    posterior: AnyPosterior,
    inputs: object,
    *,
    samples: int = 10,
    seed: int = 0,
    task: Literal["classification", "binary"] = "classification",
    temperature: float = 1.0,
    class_dim: int | None = None,
    noise: None = None,
    target: str | None = None,
    keep_samples: bool = False,
    batch_size: int | None = None,
    vectorise: bool | None = None,
    distributed: bool = False,
) -> Prediction: ...


@overload
def predict(
    model: nn.Module,
    posterior: AnyPosterior,
    inputs: object,
    *,
    samples: int = 10,
    seed: int = 0,
    task: Literal["multilabel"],
    temperature: float = 1.0,
    class_dim: None = None,
    noise: None = None,
    target: str | None = None,
    keep_samples: bool = False,
    batch_size: int | None = None,
    vectorise: bool | None = None,
    distributed: bool = False,
) -> MultilabelPrediction: ...


@overload
def predict(
    model: nn.Module,
    posterior: AnyPosterior,
    inputs: object,
    *,
    samples: int = 10,
    seed: int = 0,
    task: Literal["regression"],
    temperature: float = 1.0,
    class_dim: None = None,
    noise: Noise = None,
    target: str | None = None,
    keep_samples: bool = False,
    batch_size: int | None = None,
    vectorise: bool | None = None,
    distributed: bool = False,
) -> RegressionPrediction: ...


def predict(
    model: nn.Module,
    posterior: AnyPosterior,
    inputs: object,
    *,
    samples: int = 10,  # C
    seed: int = 0,
    task: Task = "classification",
    temperature: float = 1.0,  # T
    class_dim: int | None = None,
    noise: Noise = None,
    target: str | None = None,
    keep_samples: bool = False,
    batch_size: int | None = None,
    vectorise: bool | None = None,
    distributed: bool = False,
) -> AnyPrediction:
    """Predict with C functions drawn from the posterior: p̂(y|x) = (1/C) Σ p(y|x, w_c), w_c ~ q.

    The model is run in eval mode through a copy: its weights, buffers, flags and hooks, and the global
    random streams, are bitwise as before, also after an error. The functions are the same for every batch and
    depend on `seed` only. Results carry no graph and lie on the model's device.

    Args:
        model: returns logits (examples, classes), or as `task` says.
        posterior: weights by name; `credo.DropoutPosterior` or `credo.Ensemble`; or the string "mean": one
            function, the model with the weights it has.
        inputs: a tensor or array, a tuple or dict of the model's arguments, or an iterable of batches x, (x, y) or
            dicts, whose targets are left out (`credo.predict.inputs` has the rule).
        task: what the model's outputs are. "classification": logits of a softmax, (B, C), (B, T, C) or (B, C, H, W);
            "binary": one logit, (B,) or (B, 1), answered as two classes; "multilabel": a logit for each label, (B, L);
            "regression": values, examples first.
        temperature: divides the logits of every sample before the softmax or sigmoid; `credo.calibrate` fits it.
        class_dim: which dimension of the output holds the classes. By default the second, and the last of three.
        noise: regression only. The variance of the observations, a number or a tensor that broadcasts to the
            output; "model" if it is learnt and the model returns (mean, log_variance); None is no noise.
        target: the name of the target in dict batches, where it is none of the usual ones.
        keep_samples: keep the answer of each function as `prediction.samples`.
        batch_size: split a large tensor, tuple or dict along its first dimension.
        vectorise: None decides by shapes (`credo.predict.functions`), False is the plain loop, True vectorises
            wherever that is possible. The numbers are equal to rounding.
        distributed: True divides the batches among the ranks of `torch.distributed`. All must call with the same
            arguments, and all get the whole prediction.
    """
    samples, seed = whole("samples", samples, at_least=1), whole("seed", seed, at_least=0)
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, at_least=1)
    likelihood, reader = likelihood_of(task, noise, temperature, class_dim), Reader(model, target)
    functions = functions_of(model, posterior, samples, seed, likelihood.read, vectorise)
    world = world_asked_for() if distributed else ALONE
    turns = Turns(world) if distributed else None

    def work() -> list[AnyPrediction]:
        with preserve_rng(seed, reader.device):
            batches = reader.batches(inputs, batch_size, parts=world.size)
            return [
                _of_batch(functions, batch, likelihood, keep_samples, first=k == 0)
                for k, batch in enumerate(turns.mine(batches) if turns else batches)
            ]

    if turns is None or world.alone:
        results = work()
    else:
        results = of_all_ranks(world, turns, reader.device, likelihood.rebuilt, work)
    if not results:
        raise InvalidValue("inputs yielded no batch; an exhausted iterator must be made again")
    return joined(results)


def _of_batch(
    functions: Functions, batch: Batch, likelihood: Likelihood, keep_samples: bool, first: bool
) -> AnyPrediction:
    empty, average = batch.is_empty(), likelihood.average(keep_samples)
    for answers in functions(batch.with_one_blank() if empty else batch):
        if first and not empty:
            likelihood.inspect(answers, batch.target)
            _check_rows(answers, batch)
            first = False
        average.add(answers)
    return first_examples(average.result(), 0) if empty else average.result()


def _check_rows(answers: Outputs, batch: Batch) -> None:
    """Positions must not stand before the examples. Rows of all positions, (B·T, C), are as good as examples."""
    rows, size = answers[0].shape[1:], batch.size()
    if len(rows) > 2 and size is not None and rows[0] != size:
        raise InvalidValue(
            f"the model got {size} examples and answered with {rows[0]} rows of {len(rows)} dimensions; the first"
            " dimension must count the examples. Use batch_first=True, or transpose the output inside the model"
        )


# Prediction by many processes: each takes some of the batches, and all get the whole answer. Batch k is rank k mod P's,
# so that a loader's batches are the same as for one process, and the answers too, bit for bit. A single tensor is cut
# into P parts first, which changes the rounding of some matrix products, and nothing else.


class Turns:
    """Hands out this rank's batches, and counts them all."""

    def __init__(self, world: World) -> None:
        self._world, self.seen = world, 0

    def mine(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.seen += 1
            if (self.seen - 1) % self._world.size == self._world.rank:
                yield batch


def of_all_ranks(
    world: World,
    turns: Turns,
    device: torch.device | None,
    rebuilt: Callable[..., AnyPrediction],
    work: Callable[[], list[AnyPrediction]],
) -> list[AnyPrediction]:
    """The predictions for all batches, in their order; an error on one rank is an error on all."""
    own = outcome_of_all(world, work)
    count = torch.tensor(turns.seen, device=device)
    found = gather(world, [count, *(tensor for prediction in own for tensor in _tensors(prediction))])
    counts = [int(row[0]) for row in found]
    if len(set(counts)) > 1:
        raise InvalidValue(
            f"with distributed=True all ranks must give the same inputs; by rank they yielded {counts} batches"
        )
    queues = [
        _predictions(rebuilt, row[1:], _turns(world, rank, counts[0])) for rank, row in enumerate(found)
    ]
    return [next(queues[k % world.size]) for k in range(counts[0])]


def _turns(world: World, rank: int, batches: int) -> int:
    return len(range(rank, batches, world.size))


def _tensors(prediction: AnyPrediction) -> list[Tensor]:
    found = [getattr(prediction, field.name) for field in fields(prediction)]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _predictions(
    rebuilt: Callable[..., AnyPrediction], tensors: list[Tensor], batches: int
) -> Iterator[AnyPrediction]:
    """`samples`, which may be missing, is the last tensor."""
    each = len(tensors) // max(batches, 1)
    return (rebuilt(*tensors[k * each : (k + 1) * each]) for k in range(batches))
