"""Ties, one class, nothing, certainty and nonsense: a defined number, or an error that helps."""

import math

import pytest
import torch
from torch import Tensor

from credo import metrics
from credo.errors import CallOrderError, InvalidType, InvalidValue

PAIRED = [
    metrics.accuracy,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.adaptive_ece,
    metrics.classwise_ece,
    metrics.auroc,
    metrics.aurc,
    metrics.calibration_curve,
    metrics.risk_coverage,
    lambda probs, targets: metrics.RunningScores().update(probs, targets),
]
HALF = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
SURE = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
ZERO_ONE = torch.tensor([0, 1])

BAD_PROBS = [
    (torch.randn(4, 3) * 5, InvalidValue, "softmax"),
    (torch.full((4, 3), 0.5), InvalidValue, "sums to 1.5"),
    (torch.tensor([[1.5, -0.5]]).expand(4, 2), InvalidValue, "-0.5 to 1.5"),
    (torch.tensor([[float("nan"), 1.0]]).expand(4, 2), InvalidValue, "nan"),
    (torch.rand(4), InvalidValue, "shape (4,)"),
    (torch.rand(2, 4, 3), InvalidValue, "shape (2, 4, 3)"),
    (torch.zeros(4, 0), InvalidValue, "shape (4, 0)"),
    (torch.ones(4, 3, dtype=torch.long), InvalidType, "torch.int64"),
    ([[0.5, 0.5]], InvalidType, "a list"),
    (None, InvalidType, "NoneType"),
]
BAD_TARGETS = [
    (torch.tensor([0.0, 1.0]), InvalidType, "torch.float32"),
    (torch.tensor([True, False]), InvalidType, "torch.bool"),
    ([0, 1], InvalidType, "a list"),
    (torch.tensor([0, 1, 1]), InvalidValue, "shape (3,)"),
    (torch.tensor([[1, 0], [0, 1]]), InvalidValue, "argmax"),
    (torch.tensor([0, 2]), InvalidValue, "the class 2; probs has classes 0 to 1"),
    (torch.tensor([0, -1]), InvalidValue, "the class -1"),
]


@pytest.mark.parametrize("metric", PAIRED)
@pytest.mark.parametrize(("probs", "error", "words"), BAD_PROBS)
def test_bad_probs(metric, probs, error, words) -> None:
    with pytest.raises(error) as caught:
        metric(probs, torch.zeros(4, dtype=torch.long))
    assert "probs" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("metric", PAIRED)
@pytest.mark.parametrize(("targets", "error", "words"), BAD_TARGETS)
def test_bad_targets(metric, targets, error, words) -> None:
    with pytest.raises(error) as caught:
        metric(HALF, targets)
    assert "targets" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("metric", PAIRED[:-1])
def test_no_examples_is_an_error_and_not_a_nan(metric) -> None:
    with pytest.raises(InvalidValue, match="no examples"):
        metric(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize("metric", [metrics.ood_auroc, metrics.fpr_at_tpr])
def test_out_of_distribution_arguments_are_named(metric) -> None:
    with pytest.raises(InvalidValue, match=r"probs_out\[0\]"):
        metric(HALF, torch.tensor([[3.0, -1.0]]))
    with pytest.raises(InvalidValue, match="probs_in has shape"):
        metric(HALF[:0], HALF)
    with pytest.raises(InvalidValue, match="2 classes and probs_out 1"):
        metric(HALF, torch.ones(3, 1))


@pytest.mark.parametrize("tpr", [0.0, -0.1, 1.1, float("nan"), "0.95", True, None])
def test_bad_rate(tpr) -> None:
    with pytest.raises((InvalidValue, InvalidType), match="tpr="):
        metrics.fpr_at_tpr(HALF, HALF, tpr)


@pytest.mark.parametrize(
    "metric", [metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.calibration_curve]
)
@pytest.mark.parametrize("bins", [0, -1, 1.5, True, "20"])
def test_bad_bins(metric, bins) -> None:
    with pytest.raises((InvalidValue, InvalidType), match="bins"):
        metric(HALF, ZERO_ONE, bins)


def test_probability_zero() -> None:
    assert metrics.nll(SURE, ZERO_ONE) == 0
    assert metrics.nll(SURE, 1 - ZERO_ONE) == math.inf
    assert metrics.brier(SURE, 1 - ZERO_ONE) == 2
    assert metrics.entropy(SURE).tolist() == [0, 0]
    assert metrics.ece(SURE, ZERO_ONE) == 0
    assert metrics.ece(SURE, 1 - ZERO_ONE) == 1
    assert metrics.classwise_ece(SURE, ZERO_ONE) == 0


def test_all_correct_or_all_wrong_has_no_auroc() -> None:
    assert math.isnan(metrics.auroc(SURE, ZERO_ONE))
    assert math.isnan(metrics.auroc(SURE, 1 - ZERO_ONE))
    assert metrics.aurc(SURE, ZERO_ONE) == 0
    assert metrics.aurc(SURE, 1 - ZERO_ONE) == 1


def test_one_class_only() -> None:
    probs, targets = torch.ones(3, 1), torch.zeros(3, dtype=torch.long)
    assert metrics.accuracy(probs, targets) == 1
    assert metrics.nll(probs, targets) == metrics.brier(probs, targets) == metrics.ece(probs, targets) == 0
    assert metrics.entropy(probs).tolist() == [0, 0, 0]


def test_ties_count_half_and_the_first_top_class_wins() -> None:
    assert metrics.accuracy(HALF, ZERO_ONE) == 0.5
    assert metrics.auroc(HALF, ZERO_ONE) == 0.5
    assert metrics.ood_auroc(HALF, HALF) == 0.5
    assert metrics.fpr_at_tpr(HALF, HALF) == 1
    assert metrics.aurc(HALF, ZERO_ONE) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_are_closed_on_the_right(dtype: torch.dtype) -> None:
    top = torch.arange(1, 21, dtype=torch.float64) / 20
    top = top[top >= 0.5].to(dtype)
    probs = torch.stack([top, 1 - top], dim=1)
    curve = metrics.calibration_curve(probs, torch.zeros(len(top), dtype=torch.long))
    assert curve.examples.tolist() == [0] * 9 + [1] * 11


@pytest.mark.parametrize(
    "metric", [metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.auroc, metrics.aurc]
)
def test_the_order_of_tied_examples_does_not_matter(metric) -> None:
    generator = torch.Generator().manual_seed(0)
    top = torch.tensor([0.6, 0.8, 0.9])[torch.randint(3, (60,), generator=generator)]
    probs, targets = torch.stack([top, 1 - top], 1), torch.randint(2, (60,), generator=generator)
    order = torch.randperm(60, generator=generator)
    assert metric(probs[order], targets[order]) == pytest.approx(metric(probs, targets), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rows_are_accepted(dtype: torch.dtype) -> None:
    probs = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype)
    targets = torch.zeros(64, dtype=torch.int32)
    expected = -probs[:, 0].double().log().mean().item()
    assert metrics.nll(probs, targets) == pytest.approx(expected, abs=1e-12)
    assert 0 <= metrics.ece(probs, targets) <= 1


def test_arguments_are_neither_changed_nor_tracked() -> None:
    probs: Tensor = HALF.clone().requires_grad_()
    before = probs.detach().clone()
    for metric in PAIRED:
        metric(probs, ZERO_ONE)
    assert torch.equal(probs.detach(), before)
    assert not metrics.entropy(probs).requires_grad


def test_entropy_of_nothing_and_of_a_uniform_row() -> None:
    assert metrics.entropy(torch.zeros(0, 3)).shape == (0,)
    assert metrics.entropy(torch.full((2, 4), 0.25)).tolist() == pytest.approx([math.log(4)] * 2)


def test_running_scores_refuse_without_changing() -> None:
    scores = metrics.RunningScores()
    with pytest.raises(CallOrderError, match="update"):
        scores.compute()
    scores.update(HALF, ZERO_ONE)
    before = scores.compute()
    with pytest.raises(InvalidValue):
        scores.update(2 * HALF, ZERO_ONE)
    with pytest.raises(InvalidValue, match="15 bins"):
        scores.merge(metrics.RunningScores(bins=15))
    assert scores.compute() == before
