"""`credo.predict`: the average of what the functions of a posterior say; the model is never touched."""

from typing import Literal, overload

from torch import nn

from credo.distributed import ALONE, world_asked_for
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
from credo.predict.ranks import Turns, of_all_ranks
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
            arguments, and all get the whole prediction (`credo.predict.ranks`).
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
