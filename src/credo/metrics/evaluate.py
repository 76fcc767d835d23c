"""The scores people report, in one call, for every kind of prediction."""

import warnings
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from credo.distributed import gather, world_asked_for
from credo.errors import InvalidType, InvalidValue
from credo.metrics import regression
from credo.metrics.calibration import ece
from credo.metrics.ranking import auroc, fpr_at_tpr, ood_auroc
from credo.metrics.scores import accuracy, brier, nll
from credo.metrics.targets import IGNORED, class_rows, label_targets, tensor_of
from credo.predict.prediction import MultilabelPrediction


class HasProbs(Protocol):
    """What `credo.predict` returns for a classifier, and anything else with probabilities."""

    @property
    def probs(self) -> Tensor: ...


class HasMoments(Protocol):
    """What `credo.predict` returns for a regression, and anything else with means and variances."""

    @property
    def mean(self) -> Tensor: ...

    @property
    def variance(self) -> Tensor: ...


Scored: TypeAlias = HasProbs | HasMoments
OF_CLASSES = {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece, "auroc": auroc}


def evaluate(
    prediction: Scored,
    targets: Tensor,
    ood: HasProbs | None = None,
    *,
    ignore_index: int | None = IGNORED,
    distributed: bool = False,
) -> dict[str, float]:
    """The scores of a prediction, by name; each is a mean over examples, places and labels.

    Classes: accuracy, NLL, Brier score, ECE and AUROC. Targets are class indices in the shape of `prediction.entropy`;
    those that are `ignore_index` do not count. Labels: the same of each label as a yes or no, and `subset_accuracy`,
    the share of examples with all labels right. Regression: RMSE, NLL, CRPS and `coverage95`, the share of targets
    inside the central 95 % intervals.

    With `ood`, a prediction of classes for unfamiliar inputs, also how well the top probability tells them apart:
    `ood_auroc`, and `ood_fpr95`, the FPR at 95 % TPR.

    With `distributed`, `prediction`, `targets` and `ood` are this rank's part, of any size, and the scores those of all
    ranks' examples together, the same on every rank. What `predict(distributed=True)` returns is whole already.
    """
    if distributed:
        return evaluate(*_of_all_ranks(prediction, targets, ood), ignore_index=ignore_index)
    if isinstance(prediction, MultilabelPrediction):
        scores = _of_labels(prediction, targets)
    elif isinstance(getattr(prediction, "probs", None), Tensor):
        return _of_classes(prediction, targets, ood, ignore_index)
    elif hasattr(prediction, "mean") and hasattr(prediction, "variance"):
        scores = _of_values(prediction, targets)
    else:
        raise InvalidType(
            f"prediction is a {type(prediction).__name__} without probs, and without mean and variance;"
            " give what credo.predict returns"
        )
    if ood is not None:
        raise InvalidValue(
            "ood is for predictions of classes, where the top probability tells unfamiliar inputs apart; compare"
            " prediction.mutual_information or prediction.epistemic of both by yourself"
        )
    return scores


def _of_classes(
    prediction: Any, targets: object, ood: HasProbs | None, ignore_index: int | None
) -> dict[str, float]:
    probs = _classes_last(prediction)
    if probs.dim() < 2:
        probs, classes = prediction.probs, targets  # the metrics raise the error
    else:
        probs, classes, _ = class_rows(probs, targets, ignore_index)
        if not len(probs) and len(prediction.probs):
            raise InvalidValue(f"every target is ignore_index={ignore_index}, so there is nothing to measure")
    scores = {name: function(probs, classes) for name, function in OF_CLASSES.items()}  # type: ignore[arg-type]
    if ood is not None:
        others = _classes_last(ood).reshape(-1, probs.shape[-1])
        scores["ood_auroc"] = ood_auroc(probs, others)
        scores["ood_fpr95"] = fpr_at_tpr(probs, others, tpr=0.95)
    return scores


def _classes_last(prediction: HasProbs) -> Tensor:
    place = getattr(prediction, "class_dim", -1)
    return prediction.probs if prediction.probs.dim() < 2 else prediction.probs.movedim(place, -1)


def _of_labels(prediction: MultilabelPrediction, targets: object) -> dict[str, float]:
    p = prediction.probs
    truth = label_targets(p, targets).bool()
    rows = torch.stack([1 - p.double(), p.double()], -1).reshape(-1, 2)
    scores = {name: function(rows, truth.reshape(-1).long()) for name, function in OF_CLASSES.items()}
    logs = torch.where(truth, prediction.log_probs, prediction.log_complements)  # 1 − p would round
    right = ((p > 0.5) == truth).flatten(1).all(1)
    return {**scores, "nll": -logs.double().mean().item(), "subset_accuracy": right.double().mean().item()}


def _of_values(prediction: Any, targets: Any) -> dict[str, float]:
    mean, variance = prediction.mean, prediction.variance
    _warn_of_no_noise(getattr(prediction, "aleatoric", None))
    if (
        mean.dim() > 1
        and mean.shape[-1] == 2
        and tuple(tensor_of(targets, mean.device).shape) == mean.shape[:-1]
    ):
        raise InvalidValue(
            f"targets has shape {tuple(mean.shape[:-1])} and the predicted mean {tuple(mean.shape)}; if the model "
            "gives a mean and a log-variance for each target, let it return them as a pair (mean, log_variance) and "
            "say predict(..., noise='model')"
        )
    return {
        "rmse": regression.rmse(mean, targets),
        "nll": regression.gaussian_nll(mean, variance, targets),
        "crps": regression.crps(mean, variance, targets),
        "coverage95": regression.coverage(mean, variance, targets, 0.95),
    }


def _warn_of_no_noise(aleatoric: object) -> None:
    if isinstance(aleatoric, Tensor) and aleatoric.numel() and not bool(aleatoric.any()):
        warnings.warn(
            "the prediction was made without noise: its variance is that of the mean alone, and says nothing of how "
            "far observations lie from it, so NLL, CRPS and coverage are too hard. Give predict(..., noise=variance) "
            "(the mean squared error on validation data; credo.calibrate fits it), or noise='model'",
            UserWarning,
            stacklevel=4,
        )


def _of_all_ranks(prediction: Any, targets: Any, ood: Any) -> tuple[Any, Tensor, Any]:
    """All ranks' examples, in the order of ranks."""
    parts = [prediction] if ood is None else [prediction, ood]
    names = [_scored_fields(part) for part in parts]
    own = [getattr(part, name) for part, row in zip(parts, names, strict=True) for name in row]
    own.append(tensor_of(targets, own[0].device))
    columns = [torch.cat(column) for column in zip(*gather(world_asked_for(), own), strict=True)]
    whole = [
        _with(part, {name: columns.pop(0) for name in row}) for part, row in zip(parts, names, strict=True)
    ]
    return whole[0], columns[0], whole[1] if len(whole) > 1 else None


def _scored_fields(prediction: Any) -> list[str]:
    if isinstance(prediction, MultilabelPrediction):
        return ["probs", "log_probs", "log_complements"]
    return ["probs"] if hasattr(prediction, "probs") else ["mean", "variance"]


def _with(prediction: Any, tensors: dict[str, Tensor]) -> Any:
    if is_dataclass(prediction) and not isinstance(prediction, type):
        known = {field.name for field in fields(prediction)}
        return replace(prediction, **{n: t for n, t in tensors.items() if n in known})
    return SimpleNamespace(**tensors)
