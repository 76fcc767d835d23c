"""Kinds of output: each against its definition, written out over the samples."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue
from credo.predict import MultilabelPrediction, predict
from tests.predict.models import around, generator, rows

SAMPLES = 5


class Shaped(nn.Module):
    """A linear layer whose outputs are laid out in some shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.fc, self.shape = nn.Linear(4, int(np.prod(shape))), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).view(len(x), *self.shape)


def each(model: nn.Module, q: credo.DiagonalPosterior) -> Tensor:
    """What the sampled networks return, one after the other."""
    draws = q.sample_many(generator(0), SAMPLES)
    with torch.no_grad():
        return torch.stack(
            [
                torch.func.functional_call(model, {n: w[k] for n, w in draws.items()}, (rows(),))
                for k in range(SAMPLES)
            ]
        )


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize(
    ("shape", "class_dim", "place"),
    [
        ((3,), None, 1),
        ((3,), -1, 1),
        ((5, 3), None, 2),  # positions, classes
        ((3, 5), 1, 1),
        ((3, 3), None, 2),
        ((3, 2, 5), None, 1),  # classes, height, width
        ((2, 5, 3), -1, 3),
        ((2, 3, 5), 2, 2),
        ((3, 2, 2, 2), None, 1),
    ],
)
def test_classes_in_every_layout(
    shape: tuple[int, ...], class_dim: int | None, place: int, vectorise: bool
) -> None:
    model = Shaped(*shape)
    q = around(model)
    found = predict(
        model,
        q,
        rows(),
        samples=SAMPLES,
        class_dim=class_dim,
        keep_samples=True,
        vectorise=vectorise,
        temperature=2.0,
    )
    p = (each(model, q) / 2).softmax(place + 1)
    torch.testing.assert_close(found.samples, p)
    torch.testing.assert_close(found.probs, p.mean(0))
    torch.testing.assert_close(found.log_probs, p.mean(0).log())
    entropy, expected = (torch.special.entr(t).sum(k) for t, k in ((p.mean(0), place), (p, place + 1)))
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(found.expected_entropy, expected.mean(0))
    torch.testing.assert_close(found.mutual_information, entropy - expected.mean(0), atol=1e-6, rtol=1e-4)
    assert found.class_dim == place
    assert found.probs.shape == (6, *shape)


@pytest.mark.parametrize("shape", [(5, 3), (3, 2, 5)])
def test_batches_are_joined_and_scored_place_by_place(shape: tuple[int, ...]) -> None:
    model = Shaped(*shape)
    q = around(model)
    found = predict(model, q, list(rows().split(4)), samples=SAMPLES)
    torch.testing.assert_close(found.probs, predict(model, q, rows(), samples=SAMPLES).probs)
    targets = torch.randint(3, found.entropy.shape, generator=generator(4))
    scores = credo.evaluate(found, targets)
    flat = found.probs.movedim(found.class_dim, -1).reshape(-1, 3)
    truth = -flat.gather(1, targets.reshape(-1, 1)).log().mean()
    assert scores["nll"] == pytest.approx(float(truth), rel=1e-6)
    assert scores["accuracy"] == pytest.approx(float((flat.argmax(1) == targets.flatten()).double().mean()))
    padded = targets.clone()
    padded[:, 0] = -100
    kept = padded.flatten() != -100
    ignored = -flat[kept].gather(1, targets.reshape(-1, 1)[kept]).log().mean()
    assert credo.evaluate(found, padded)["nll"] == pytest.approx(float(ignored), rel=1e-6)
    with pytest.raises(InvalidValue, match="class -100"):
        credo.evaluate(found, padded, ignore_index=None)


def test_targets_of_another_layout_are_refused_with_the_remedy() -> None:
    found = predict(Shaped(3, 5), "mean", rows())  # read as 3 positions and 5 classes
    with pytest.raises(InvalidValue, match=r"\(6, 5\).*give \(6, 3\).*class_dim"):
        credo.evaluate(found, torch.zeros(6, 5).long())


def test_targets_in_the_batches_tell_a_wrong_layout() -> None:
    model, y = Shaped(3, 5), torch.zeros(6, 5).long()
    with pytest.raises(InvalidValue, match=r"\(6, 3, 5\).*\(6, 5\).*class_dim=1"):
        predict(model, "mean", [(rows(), y)])
    found = predict(model, "mean", [(rows(), y)], class_dim=1)
    assert found.entropy.shape == y.shape
    with pytest.raises(InvalidValue, match="class_dim=3"):
        predict(Shaped(2, 5, 3), "mean", [(rows(), torch.zeros(6, 2, 5).long())])
    predict(model, "mean", [(rows(), torch.zeros(6, 3).long())])
    predict(model, "mean", [(rows(), torch.zeros(6, 9).long())])  # some other label


@pytest.mark.parametrize("shape", [(), (1,), (5, 1), (1, 2, 5)])
def test_one_logit_is_a_problem_of_two_classes(shape: tuple[int, ...]) -> None:
    model = Shaped(*shape)
    q = around(model)
    found = predict(model, q, rows(), samples=SAMPLES, task="binary", temperature=0.5)
    p = (each(model, q) / 0.5).sigmoid().mean(0).reshape(found.entropy.shape)
    torch.testing.assert_close(found.probs.select(found.class_dim, 1), p)
    torch.testing.assert_close(found.probs.select(found.class_dim, 0), 1 - p)
    targets = torch.randint(2, p.shape, generator=generator(4))
    truth = F.binary_cross_entropy(p, targets.float())
    raw = (6, *shape)
    for given in (targets, targets.float(), targets.bool(), targets.float().view(raw), targets.numpy()):
        assert credo.evaluate(found, given)["nll"] == pytest.approx(float(truth), rel=1e-5)


def test_labels_are_independent() -> None:
    model = Shaped(7)
    q = around(model)
    found = predict(
        model, q, rows(), samples=SAMPLES, task="multilabel", temperature=3.0, keep_samples=True, batch_size=4
    )
    assert isinstance(found, MultilabelPrediction)
    p = (each(model, q) / 3).sigmoid()
    torch.testing.assert_close(found.samples, p)
    torch.testing.assert_close(found.probs, p.mean(0))
    torch.testing.assert_close(found.log_complements, (1 - p.mean(0)).log())
    both = lambda t: torch.special.entr(t) + torch.special.entr(1 - t)  # noqa: E731
    torch.testing.assert_close(found.entropy, both(p.mean(0)))
    torch.testing.assert_close(found.expected_entropy, both(p).mean(0))
    torch.testing.assert_close(
        found.mutual_information, both(p.mean(0)) - both(p).mean(0), atol=1e-6, rtol=1e-4
    )
    y = torch.randint(2, (6, 7), generator=generator(4))
    scores = credo.evaluate(found, y)
    assert scores["nll"] == pytest.approx(float(F.binary_cross_entropy(p.mean(0), y.float())), rel=1e-5)
    right = (p.mean(0) > 0.5) == y.bool()
    assert scores["accuracy"] == pytest.approx(float(right.double().mean()))
    assert scores["subset_accuracy"] == pytest.approx(float(right.all(1).double().mean()))
    assert scores["brier"] == pytest.approx(float(2 * (p.mean(0) - y).square().mean()), rel=1e-5)


def test_labels_that_are_almost_certain_keep_a_finite_nll() -> None:
    class Sure(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 200 + super().forward(x)

    found = predict(Sure(4, 2), "mean", rows(), task="multilabel")
    assert bool((found.probs == 1).all())
    nll = credo.evaluate(found, torch.zeros(6, 2))["nll"]
    assert 150 < nll < 250


class Ends(nn.Module):
    def __init__(self, end: nn.Module, outputs: int = 3) -> None:
        super().__init__()
        self.fc, self.end = nn.Linear(4, outputs), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.fc(x))


@pytest.mark.parametrize("posterior", ["mean", "sampled"])
def test_outputs_that_are_probabilities_are_warned_of_once(posterior: str) -> None:
    for model, task, word in (
        (Ends(nn.Softmax(1)), "classification", "Softmax"),
        (Ends(nn.Softmax(1)).half().float(), "classification", "Softmax"),
        (Ends(nn.Sigmoid(), 7), "multilabel", "Sigmoid"),
        (Ends(nn.Sigmoid(), 1), "binary", "Sigmoid"),
    ):
        q = around(model) if posterior == "sampled" else "mean"
        with pytest.warns(UserWarning, match=f"look like probabilities.*{word}") as caught:
            predict(model, q, [rows(30), rows(30)], task=task, samples=3)  # type: ignore[call-overload]
        assert len(caught) == 1


def test_logits_and_log_probabilities_are_not_warned_of() -> None:
    zero = Ends(nn.Identity())
    nn.init.zeros_(zero.fc.weight)
    nn.init.zeros_(zero.fc.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (Ends(nn.Identity()), Ends(nn.LogSoftmax(1)), Ends(nn.ReLU()), zero):
            predict(model, "mean", rows(30))
            predict(model, "mean", rows(30), task="regression")
        for task in ("multilabel", "binary"):
            predict(Ends(nn.Identity(), 1), "mean", rows(30), task=task)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("shape", "how", "error", "word"),
    [
        ((), {}, InvalidValue, "task='binary'"),
        ((1,), {}, InvalidValue, "task='binary'"),
        ((3,), {"task": "binary"}, InvalidValue, r"\(6, 3\).*task='multilabel'"),
        ((5, 2), {"task": "binary"}, InvalidValue, "class_dim"),
        ((), {"task": "multilabel"}, InvalidValue, "task='binary'"),
        ((3,), {"class_dim": 2}, InvalidValue, "class_dim=2.*1 … 1"),
        ((3,), {"class_dim": 0}, InvalidValue, "class_dim=0.*counts the examples"),
        ((3,), {"class_dim": "1"}, InvalidType, "class_dim"),
        ((3,), {"class_dim": 1, "task": "regression"}, InvalidValue, "class_dim=1 is for"),
        ((3,), {"class_dim": 1, "task": "multilabel"}, InvalidValue, "class_dim=1 is for"),
        ((3,), {"noise": 1.0, "task": "multilabel"}, InvalidValue, "noise"),
        (
            (3,),
            {"noise": torch.ones(2), "task": "regression"},
            InvalidValue,
            r"noise has shape \(2,\).*\(6, 3\)",
        ),
        ((3,), {"task": None}, InvalidValue, "'multilabel' or 'regression', got None"),
    ],
)
def test_what_fits_no_task_is_refused(
    shape: tuple[int, ...], how: dict[str, object], error: type[Exception], word: str
) -> None:
    model = Shaped(*shape)
    for posterior in ("mean", around(model)):
        with pytest.raises(error, match=word):
            predict(model, posterior, rows(), **how)  # type: ignore[call-overload]


def test_batches_of_different_lengths_are_refused_with_the_remedy() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens)

    batches = [torch.zeros(2, 5).long(), torch.zeros(2, 7).long()]
    with pytest.raises(InvalidValue, match=r"batch 1 .*\(7, 3\).*\(5, 3\).*pad"):
        predict(Tokens(), "mean", batches)
