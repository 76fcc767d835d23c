"""Every metric against scikit-learn, torchmetrics, or a loop that follows the definition."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve as sklearn_calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score, roc_curve
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from credo import metrics

SHAPES = [(50, 2), (1000, 10), (333, 100)]
CLOSE = 1e-6


def predictions(examples: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that know something about the targets, in float64."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (examples,), generator=generator)
    logits = 2 * torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(examples), targets] += 1.5
    return logits.softmax(1), targets


def with_ties(probs: Tensor) -> Tensor:
    """Confidences rounded to tenths: many are equal."""
    top = (probs.amax(1) * 10).round().clamp(2, 10) / 10
    rest = ((1 - top) / (probs.shape[1] - 1))[:, None].expand_as(probs).clone()
    return rest.scatter_(1, probs.argmax(1, keepdim=True), top[:, None])


@pytest.mark.parametrize("shape", SHAPES)
def test_scores(shape: tuple[int, int]) -> None:
    probs, targets = predictions(*shape)
    p, y, labels = probs.numpy(), targets.numpy(), list(range(shape[1]))
    assert metrics.accuracy(probs, targets) == pytest.approx(accuracy_score(y, p.argmax(1)), abs=CLOSE)
    assert metrics.nll(probs, targets) == pytest.approx(log_loss(y, p, labels=labels), abs=CLOSE)
    expected = brier_score_loss(y, p if shape[1] > 2 else p[:, 1], labels=labels, scale_by_half=False)
    assert metrics.brier(probs, targets) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bins", [1, 15, 20])
def test_ece(shape: tuple[int, int], bins: int) -> None:
    probs, targets = predictions(*shape)
    expected = multiclass_calibration_error(probs, targets, num_classes=shape[1], n_bins=bins, norm="l1")
    assert metrics.ece(probs, targets, bins) == pytest.approx(expected.item(), abs=CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_classwise_ece(shape: tuple[int, int]) -> None:
    probs, targets = predictions(*shape)
    each = [
        binary_calibration_error(probs[:, k], (targets == k).long(), n_bins=20, norm="l1")
        for k in range(shape[1])
    ]
    assert metrics.classwise_ece(probs, targets) == pytest.approx(torch.stack(each).mean().item(), abs=CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bins", [1, 7, 20, 2000])
def test_adaptive_ece(shape: tuple[int, int], bins: int) -> None:
    """Without ties the bins are an equal split of the sorted confidences; some may be empty."""
    probs, targets = predictions(*shape)
    confidence, correct = probs.amax(1).numpy(), (probs.argmax(1) == targets).numpy()
    order, count = np.argsort(confidence), len(confidence)
    edges = [-(-count * b // bins) for b in range(bins + 1)]
    parts = [order[a:b] for a, b in pairwise(edges) if b > a]
    expected = sum(len(i) / count * abs(confidence[i].mean() - correct[i].mean()) for i in parts)
    assert metrics.adaptive_ece(probs, targets, bins) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_calibration_curve(shape: tuple[int, int]) -> None:
    probs, targets = predictions(*shape)
    curve = metrics.calibration_curve(probs, targets)
    correct = (probs.argmax(1) == targets).numpy()
    accuracy, confidence = sklearn_calibration_curve(correct, probs.amax(1).numpy(), n_bins=20)
    seen = curve.examples > 0
    np.testing.assert_allclose(curve.accuracy[seen], accuracy, atol=CLOSE)
    np.testing.assert_allclose(curve.confidence[seen], confidence, atol=CLOSE)
    assert curve.examples.sum() == shape[0]
    assert curve.accuracy[~seen].isnan().all()
    assert curve.confidence[~seen].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_auroc(shape: tuple[int, int], ties: bool) -> None:
    probs, targets = predictions(*shape)
    probs = with_ties(probs) if ties else probs
    correct = probs.argmax(1) == targets
    expected = roc_auc_score(correct.numpy(), probs.amax(1).numpy())
    assert metrics.auroc(probs, targets) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tpr", [0.05, 0.35, 0.5, 0.55, 0.95, 1.0])
def test_out_of_distribution(ties: bool, tpr: float) -> None:
    probs_in, _ = predictions(400, 10, seed=1)
    probs_out, _ = predictions(300, 10, seed=2)
    probs_out = (probs_out + 0.05) / 1.5
    if ties:
        probs_in, probs_out = with_ties(probs_in), with_ties(probs_out)
    familiar = np.r_[np.ones(400), np.zeros(300)]
    confidence = torch.cat([probs_in, probs_out]).amax(1).numpy()
    assert metrics.ood_auroc(probs_in, probs_out) == pytest.approx(
        roc_auc_score(familiar, confidence), abs=CLOSE
    )
    fpr, rates, _ = roc_curve(familiar, confidence, drop_intermediate=False)
    assert metrics.fpr_at_tpr(probs_in, probs_out, tpr) == pytest.approx(
        fpr[rates >= tpr - 1e-9][0], abs=CLOSE
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_risk_coverage(shape: tuple[int, int]) -> None:
    probs, targets = predictions(*shape)
    confidence, wrong = probs.amax(1).numpy(), (probs.argmax(1) != targets).numpy()
    order = np.argsort(-confidence)
    risks = [wrong[order[: k + 1]].mean() for k in range(shape[0])]
    curve = metrics.risk_coverage(probs, targets)
    np.testing.assert_allclose(curve.risk, risks, atol=CLOSE)
    np.testing.assert_allclose(curve.coverage, np.arange(1, shape[0] + 1) / shape[0], atol=CLOSE)
    assert metrics.aurc(probs, targets) == pytest.approx(np.mean(risks), abs=CLOSE)


def test_risk_coverage_with_ties_is_the_mean_over_random_orders() -> None:
    probs, targets = predictions(40, 4)
    probs = with_ties(probs)
    confidence, wrong = probs.amax(1).numpy(), (probs.argmax(1) != targets).numpy()
    random, areas = np.random.default_rng(0), []
    for _ in range(4000):
        order = np.lexsort((random.random(40), -confidence))
        areas.append((wrong[order].cumsum() / np.arange(1, 41)).mean())
    assert metrics.aurc(probs, targets) == pytest.approx(np.mean(areas), abs=4 * np.std(areas) / 4000**0.5)


def test_entropy() -> None:
    probs, _ = predictions(100, 10)
    torch.testing.assert_close(metrics.entropy(probs), torch.distributions.Categorical(probs).entropy())


@pytest.mark.parametrize("shape", SHAPES)
def test_running_scores_equal_the_functions_on_everything(shape: tuple[int, int]) -> None:
    probs, targets = predictions(*shape)
    left, right = metrics.RunningScores(), metrics.RunningScores()
    for number, (p, y) in enumerate(zip(probs.split(37), targets.split(37), strict=True)):
        (left if number % 3 else right).update(p, y)
    left.update(probs[:0], targets[:0])
    left.merge(right)
    names = ("accuracy", "nll", "brier", "ece")
    expected = {name: getattr(metrics, name)(probs, targets) for name in names}
    assert left.compute() == pytest.approx(expected, abs=1e-12)
