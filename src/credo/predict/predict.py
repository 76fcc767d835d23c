"""`credo.predict`: the average of what the functions of a posterior say; the model is never touched."""

from collections.abc import Callable
from typing import Literal, TypeAlias, overload

from torch import nn

from credo.distributed import ALONE, world_asked_for
from credo.errors import InvalidValue
from credo.posterior.arguments import whole
from credo.posterior.isolation import undisturbed
from credo.posterior.stand_in import device_of
from credo.predict.averages import (
    AnyPrediction,
    Average,
    ClassAverage,
    RegressionAverage,
    first_examples,
    joined,
)
from credo.predict.functions import AnyPosterior, Functions, functions_of
from credo.predict.inputs import Batch, batches
from credo.predict.noise import Noise, noise_variance
from credo.predict.outputs import Read, logits, values, values_and_log_variances
from credo.predict.prediction import Prediction, RegressionPrediction
from credo.predict.ranks import Turns, of_all_ranks

Task: TypeAlias = Literal["classification", "regression"]


@overload
def predict(
    model: nn.Module,
    posterior: AnyPosterior,
    inputs: object,
    *,
    samples: int = 10,
    seed: int = 0,
    task: Literal["classification"] = "classification",
    noise: None = None,
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
    task: Literal["regression"],
    noise: Noise = None,
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
    noise: Noise = None,
    keep_samples: bool = False,
    batch_size: int | None = None,
    vectorise: bool | None = None,
    distributed: bool = False,
) -> AnyPrediction:
    """Predict with C functions drawn from the posterior: p̂(y|x) = (1/C) Σ p(y|x, w_c), w_c ~ q.

    The model is run in eval mode through a stand-in: its weights, buffers, flags and hooks, and the global
    random streams, are bitwise as before, also after an error. The functions are the same for every batch and
    depend on `seed` only. Results carry no graph and lie on the model's device.

    Args:
        model: returns logits (examples, classes), or for regression values with examples first.
        posterior: weights by name; `credo.DropoutPosterior` or `credo.Ensemble`; or the string "mean": one
            function, the model with the weights it has.
        inputs: a tensor, a tuple or dict of the model's arguments, or an iterable of batches x, (x, y) or
            dicts, whose labels are left out (`credo.predict.inputs` has the rule).
        noise: regression only. The variance of the observations, a number or a tensor that broadcasts to the
            output; "model" if it is learnt and the model returns (mean, log_variance); None is no noise.
        keep_samples: keep the answer of each function as `prediction.samples`.
        batch_size: split a large tensor, tuple or dict along its first dimension.
        vectorise: None decides by shapes (`credo.predict.plan`), False is the plain loop, True vectorises
            wherever that is possible. The numbers are equal to rounding.
        distributed: True divides the batches among the ranks of `torch.distributed`. All must call with the same
            arguments, and all get the whole prediction (`credo.predict.ranks`).
    """
    samples, seed = whole("samples", samples, at_least=1), whole("seed", seed, at_least=0)
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, at_least=1)
    read, average = _task(task, noise, keep_samples)
    functions, device = functions_of(model, posterior, samples, seed, read, vectorise), device_of(model)
    everybody = world_asked_for() if distributed else ALONE
    turns = Turns(everybody)

    def work() -> list[AnyPrediction]:
        found = batches(inputs, batch_size, device, parts=everybody.size)
        with undisturbed(seed, device):
            return [_of_batch(functions, batch, average()) for batch in turns.mine(found)]

    kind = Prediction if task == "classification" else RegressionPrediction
    results = work() if everybody.alone else of_all_ranks(everybody, turns, device, kind, work)
    if not results:
        raise InvalidValue("inputs yielded no batch; an exhausted iterator must be made again")
    return joined(results)


def _of_batch(functions: Functions, batch: Batch, average: Average) -> AnyPrediction:
    empty = batch.is_empty()
    for outputs in functions(batch.with_one_blank() if empty else batch):
        average.add(outputs)
    return first_examples(average.result(), 0) if empty else average.result()


def _task(task: str, noise: Noise, keep_samples: bool) -> tuple[Read, Callable[[], Average]]:
    if task == "classification":
        if noise is not None:
            raise InvalidValue("noise is for task='regression'; a classifier's is in its probabilities")
        return logits, lambda: ClassAverage(keep_samples)
    if task == "regression":
        read = values_and_log_variances if isinstance(noise, str) and noise == "model" else values
        variance = noise_variance(noise)
        return read, lambda: RegressionAverage(keep_samples, variance)
    raise InvalidValue(f"task must be 'classification' or 'regression', got {task!r}")
