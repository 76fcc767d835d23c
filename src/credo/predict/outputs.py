"""From what a model returns to a prediction: how a task reads outputs, what it makes of many, and what looks wrong.

Logits arrive as the model lays them out and leave with their classes in the last dimension.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.predict.prediction import (
    AnyPrediction,
    Average,
    ClassAverage,
    LabelAverage,
    MultilabelPrediction,
    Outputs,
    Prediction,
    RegressionAverage,
    RegressionPrediction,
    class_place,
)
from credo.validate import positive


def logits(output: object, class_dim: int | None = None) -> Outputs:
    """(B, …, C)."""
    tensor = _tensor(output)
    if tensor.dim() < 2:
        raise InvalidValue(
            f"a classifier must return logits of shape (examples, classes), (examples, positions, classes) or"
            f" (examples, classes, height, width), got {tuple(tensor.shape)}; one logit an example is"
            " task='binary', values are task='regression'"
        )
    place = class_place(tensor.dim(), class_dim)
    if tensor.shape[place] < 2:
        raise InvalidValue(
            f"the model returned {tuple(tensor.shape)}, with {tensor.shape[place]} classes in dimension {place}, and a"
            " softmax over one class is 1 for every input; one logit is task='binary', otherwise return two logits or"
            " name the dimension of the classes: class_dim=..."
        )
    return (tensor.movedim(place, -1),)


def single_logits(output: object, class_dim: int | None = None) -> Outputs:
    """(B, …, 2): the logits 0 and z of the two classes, whose softmax is 1 − sigmoid(z) and sigmoid(z)."""
    tensor = _with_examples(_tensor(output))
    if tensor.dim() > 1:
        place = class_place(tensor.dim(), class_dim)
        if tensor.shape[place] != 1:
            raise InvalidValue(
                f"task='binary' is one logit an example, (B,) or (B, 1), or a place, (B, 1, H, W) or (B, T, 1); the"
                f" model returned {tuple(tensor.shape)}, with {tensor.shape[place]} in dimension {place}. Two logits"
                " are task='classification', several labels task='multilabel'; class_dim=... names another dimension"
            )
        tensor = tensor.movedim(place, -1).squeeze(-1)
    return (torch.stack([torch.zeros_like(tensor), tensor], -1),)


def label_logits(output: object) -> Outputs:
    tensor = _with_examples(_tensor(output))
    if tensor.dim() < 2:
        raise InvalidValue(
            f"task='multilabel' is a logit for each label, (examples, labels, …), got {tuple(tensor.shape)};"
            " one logit an example is task='binary'"
        )
    return (tensor,)


def values(output: object) -> Outputs:
    return (_with_examples(_tensor(output)),)


def values_and_log_variances(output: object) -> Outputs:
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise InvalidType(
            f"with noise='model' the model must return (mean, log_variance), got {type(output).__name__}"
        )
    mean, log_variance = _with_examples(_tensor(output[0])), _tensor(output[1])
    try:
        return mean, log_variance.expand(mean.shape)
    except RuntimeError as error:
        raise InvalidValue(
            f"with noise='model' the model returned a mean of shape {tuple(mean.shape)} and a log_variance of shape"
            f" {tuple(log_variance.shape)}, which does not broadcast to it"
        ) from error


def _tensor(output: object) -> Tensor:
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        pair = isinstance(output, tuple) and len(output) == 2
        hint = "; for (mean, log_variance): task='regression', noise='model'" if pair else ""
        raise InvalidType(
            f"the model returned {type(output).__name__}; it must return a tensor, or something with .logits{hint}"
        )
    if not output.is_floating_point():
        raise InvalidType(
            f"the model returned a tensor of {output.dtype}; logits and values are floating-point"
        )
    return output


def _with_examples(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        raise InvalidValue(
            "the model returned a single number; its output needs the examples' dimension first"
        )
    return tensor


Noise: TypeAlias = float | Tensor | Literal["model"] | None


def noise_variance(noise: object) -> Tensor | None:
    """The given variance as a tensor; None if there is none, or if the model tells it."""
    if noise is None or (isinstance(noise, str) and noise == "model"):
        return None
    if isinstance(noise, bool) or not isinstance(noise, int | float | Tensor):
        raise InvalidType(f"noise must be a variance (number or tensor), 'model' or None, got {noise!r:.80}")
    variance = torch.as_tensor(noise).detach()
    if variance.is_complex() or variance.dtype == torch.bool:
        raise InvalidType(f"noise must be a real variance, got a tensor of {variance.dtype}")
    if not bool((variance.isfinite() & (variance >= 0)).all()):
        raise InvalidValue(f"noise is a variance and must be finite and >= 0, got {noise!r:.80}")
    return variance


Task: TypeAlias = Literal["classification", "binary", "multilabel", "regression"]
TASKS: tuple[str, ...] = get_args(Task)
CLOSE_TO_ONE = 1e-3  # of the sum of a row: half precision rounds so
SOME = 64  # examples that are looked at
ENOUGH = 20  # outputs between 0 and 1 that are no accident


class Likelihood(Protocol):
    def read(self, output: object) -> Outputs:
        """What the model returned as tensors, one row per example; also under vmap."""

    def average(self, keep_samples: bool) -> Average: ...

    def rebuilt(self, *tensors: Tensor) -> AnyPrediction:
        """The prediction that has these tensors, in the order of its fields."""

    def inspect(self, answers: Outputs, target: object) -> None:
        """Warns of answers (samples, examples, …) that cannot be meant; raises where the target contradicts them."""


@dataclass(frozen=True)
class Categorical:
    """softmax(f/T). `single`: the model returns one logit, and the classes are no and yes."""

    temperature: float = 1.0
    class_dim: int | None = None
    single: bool = False

    def read(self, output: object) -> Outputs:
        return (single_logits if self.single else logits)(output, self.class_dim)

    def average(self, keep_samples: bool) -> ClassAverage:
        return ClassAverage(keep_samples, self.temperature, self.class_dim)

    def rebuilt(self, *tensors: Tensor) -> Prediction:
        probs, log_probs, entropy, expected, disagreement, *samples = tensors
        place = class_place(probs.dim(), self.class_dim)
        kept = samples[0] if samples else None
        return Prediction(probs, log_probs, entropy, expected, disagreement, kept, place)

    def inspect(self, answers: Outputs, target: object) -> None:
        self._check_layout(answers[0][0], target)
        if self.single:
            _warn_of_sigmoid(answers[0][0, ..., 1], "binary")
            return
        rows = answers[0][0, :SOME].reshape(-1, answers[0].shape[-1])
        if (
            not len(rows) or abs(float(rows[0].sum()) - 1) > CLOSE_TO_ONE
        ):  # nearly always so: one row is enough
            return
        if bool((rows >= 0).all() & ((rows.sum(-1) - 1).abs() <= CLOSE_TO_ONE).all()):
            _warn("are not negative and sum to one over the classes", "Softmax", "softmax")

    def _check_layout(self, rows: Tensor, target: object) -> None:
        """Class indices in the batch tell which dimension they lack; (B, T, C) and (B, C, T) look alike without."""
        if not isinstance(target, Tensor) or target.is_floating_point() or target.shape == rows.shape[:-1]:
            return
        place = class_place(rows.dim(), self.class_dim)
        shape = rows.movedim(-1, place).shape
        fitting = [k for k in range(1, len(shape)) if target.shape == (*shape[:k], *shape[k + 1 :])]
        if fitting:
            raise InvalidValue(
                f"the model returned {tuple(shape)} and the batch has targets of shape {tuple(target.shape)}, which fit"
                f" classes in dimension {fitting[0]}, not {place}; say class_dim={fitting[0]}"
            )


@dataclass(frozen=True)
class Bernoulli:
    """sigmoid(f/T) for every output."""

    temperature: float = 1.0

    def read(self, output: object) -> Outputs:
        return label_logits(output)

    def average(self, keep_samples: bool) -> LabelAverage:
        return LabelAverage(keep_samples, self.temperature)

    def rebuilt(self, *tensors: Tensor) -> MultilabelPrediction:
        return MultilabelPrediction(*tensors)

    def inspect(self, answers: Outputs, target: object) -> None:
        _warn_of_sigmoid(answers[0][0], "multilabel")


@dataclass(frozen=True)
class Gaussian:
    """N(f, noise); `learnt`: the model returns (mean, log_variance)."""

    noise: Tensor | None = None
    learnt: bool = False

    def read(self, output: object) -> Outputs:
        return values_and_log_variances(output) if self.learnt else values(output)

    def average(self, keep_samples: bool) -> RegressionAverage:
        return RegressionAverage(keep_samples, self.noise)

    def rebuilt(self, *tensors: Tensor) -> RegressionPrediction:
        return RegressionPrediction(*tensors)

    def inspect(self, answers: Outputs, target: object) -> None:
        pass


def likelihood_of(task: object, noise: Noise, temperature: object, class_dim: object) -> Likelihood:
    """The likelihood of a task with its options; raises for options of another task."""
    if not isinstance(task, str) or task not in TASKS:
        raise InvalidValue(
            f"task must be {', '.join(map(repr, TASKS[:-1]))} or {TASKS[-1]!r}, got {task!r:.80}"
        )
    heat = positive("temperature", temperature)
    if class_dim is not None and (isinstance(class_dim, bool) or not isinstance(class_dim, int)):
        raise InvalidType(f"class_dim must be an int or None, got {class_dim!r:.80}")
    if class_dim == 0:
        class_place(2, class_dim)
    if class_dim is not None and task in ("multilabel", "regression"):
        raise InvalidValue(
            f"class_dim={class_dim} is for task='classification' and 'binary', and task={task!r}"
        )
    if task == "regression":
        if heat != 1:
            raise InvalidValue(
                f"temperature={heat:g} divides logits, and task='regression' has none; the width of its predictions is"
                " noise=..., the variance of the observations"
            )
        learnt = isinstance(noise, str) and noise == "model"
        return Gaussian(noise_variance(noise), learnt)
    if noise is not None:
        raise InvalidValue("noise is for task='regression'; a classifier's is in its probabilities")
    if task == "multilabel":
        return Bernoulli(heat)
    return Categorical(heat, class_dim, single=task == "binary")


def _warn_of_sigmoid(answers: Tensor, task: str) -> None:
    if answers.numel() < ENOUGH or not 0 < float(answers.flatten()[0]) < 1:
        return
    if bool(((answers > 0) & (answers < 1)).all()):
        _warn(f"all lie between 0 and 1 (task={task!r})", "Sigmoid", "sigmoid")


def _warn(what: str, layer: str, function: str) -> None:
    warnings.warn(
        f"the model's outputs {what}: they look like probabilities, and predict takes the {function} of logits. Leave"
        f" out the {layer} at the end of the model, or return the logarithm of its result where it sums to one",
        UserWarning,
        stacklevel=2,
    )
