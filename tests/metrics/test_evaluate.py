"""One call, the same numbers as the functions."""

from types import SimpleNamespace

import pytest
import torch

from credo import metrics


@pytest.fixture
def predictions() -> tuple[SimpleNamespace, SimpleNamespace, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    familiar, unfamiliar = (scale * torch.randn(50, 4, generator=generator) for scale in (3, 1))
    targets = torch.randint(4, (50,), generator=generator)
    return SimpleNamespace(probs=familiar.softmax(1)), SimpleNamespace(probs=unfamiliar.softmax(1)), targets


def test_evaluate(predictions) -> None:
    prediction, _, targets = predictions
    names = ["accuracy", "nll", "brier", "ece", "auroc"]
    expected = {name: getattr(metrics, name)(prediction.probs, targets) for name in names}
    assert metrics.evaluate(prediction, targets) == expected


def test_evaluate_with_unfamiliar_inputs(predictions) -> None:
    prediction, ood, targets = predictions
    scores = metrics.evaluate(prediction, targets, ood=ood)
    assert scores["ood_auroc"] == metrics.ood_auroc(prediction.probs, ood.probs)
    assert scores["ood_fpr95"] == metrics.fpr_at_tpr(prediction.probs, ood.probs)
    assert list(scores)[-2:] == ["ood_auroc", "ood_fpr95"]
