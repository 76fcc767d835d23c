"""Everything a model takes goes in; what could mean two things is refused."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from credo.errors import InvalidType, InvalidValue
from credo.predict import Prediction, predict
from tests.predict.models import Net, around, images, mlp, rows

LABELS = torch.arange(10) % 3


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(a - b) * scale


def close(a: Prediction, b: Prediction) -> None:
    torch.testing.assert_close(a.probs, b.probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.mutual_information, b.mutual_information, rtol=1e-3, atol=1e-6)


def batches() -> Iterator[Tensor]:
    yield from rows(10).split(4)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(lambda: DataLoader(TensorDataset(rows(10), LABELS), batch_size=3), id="loader of pairs"),
        pytest.param(lambda: DataLoader(TensorDataset(rows(10)), batch_size=4), id="loader of singles"),
        pytest.param(lambda: DataLoader(rows(10), batch_size=4), id="loader of tensors"),
        pytest.param(batches, id="generator"),
        pytest.param(lambda: list(batches()), id="list"),
        pytest.param(lambda: [(b, torch.zeros(len(b))) for b in batches()], id="list of pairs"),
        pytest.param(lambda: [((b,), 0) for b in batches()], id="nested"),
        pytest.param(lambda: [{"input": b, "labels": 0} for b in batches()], id="dicts with labels"),
        pytest.param(lambda: [({"input": b}, 0) for b in batches()], id="pairs of dict and label"),
        pytest.param(lambda: {"input": rows(10), "targets": LABELS}, id="one dict"),
        pytest.param(lambda: (rows(10),), id="one tuple"),
    ],
)
def test_every_form_gives_the_same_prediction(inputs: object) -> None:
    model = mlp()
    q = around(model)
    close(predict(model, q, inputs()), predict(model, q, rows(10)))  # type: ignore[operator]


def test_samples_are_joined_along_the_examples() -> None:
    model = mlp()
    q = around(model)
    whole = predict(model, q, rows(10), keep_samples=True).samples
    parts = predict(model, q, batches(), keep_samples=True).samples
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 99])
def test_a_tensor_can_be_split(batch_size: int) -> None:
    model = Net()
    q = around(model)
    close(predict(model, q, images(10), batch_size=batch_size), predict(model, q, images(10)))


def test_several_arguments() -> None:
    model, a, b = TwoInputs(), rows(10), rows(10).flip(0)
    q = around(model)
    truth = predict(model, q, (a, b))
    close(predict(model, q, {"a": a, "b": b}), truth)
    close(predict(model, q, [((a, b), LABELS)]), truth)
    close(predict(model, q, [([a, b], LABELS)]), truth)
    close(predict(model, q, {"a": a, "b": b, "scale": 1.0}, batch_size=4), truth)
    assert not torch.equal(predict(model, q, {"a": a, "b": b, "scale": 2.0}).probs, truth.probs)


@pytest.mark.parametrize("make", [mlp, Net])
@pytest.mark.parametrize("posterior", ["mean", "sampled"])
def test_no_examples_give_an_empty_result_of_the_right_shape(make: type[nn.Module], posterior: str) -> None:
    model = make()
    x = images(0) if isinstance(model, Net) else rows(0)
    q = around(model) if posterior == "sampled" else "mean"
    found = predict(model, q, x, samples=5, keep_samples=True)
    assert found.samples is not None
    assert found.probs.shape == found.log_probs.shape == (0, 3)
    assert found.entropy.shape == found.mutual_information.shape == (0,)
    assert found.samples.shape[1:] == (0, 3)
    assert predict(model, q, x, task="regression").variance.shape == (0, 3)


@pytest.mark.parametrize(
    ("inputs", "error", "word"),
    [
        ([(1, 2, 3)], InvalidType, "which are inputs"),
        ([()], InvalidType, "which are inputs"),
        (np.array([["a", "b"]]), InvalidType, "inputs is a ndarray that is no array of numbers"),
        (np.array([None, 1.0]), InvalidType, "no array of numbers"),
        (["text"], InvalidType, "str"),
        ("text", InvalidType, "str"),
        (None, InvalidType, "NoneType"),
        (3, InvalidType, "int"),
        (TensorDataset(rows(3)), InvalidType, "DataLoader"),
        ([], InvalidValue, "no batch"),
        (iter(()), InvalidValue, "no batch"),
    ],
)
def test_what_is_not_understood_is_refused(inputs: object, error: type[Exception], word: str) -> None:
    model = mlp()
    with pytest.raises(error, match=word):
        predict(model, around(model), inputs)


def test_a_loader_brings_its_own_batch_size() -> None:
    model = mlp()
    with pytest.raises(InvalidValue, match="batch_size"):
        predict(model, around(model), batches(), batch_size=2)


def test_loaders_made_for_training_are_warned_of() -> None:
    data = TensorDataset(torch.randn(10, 4), torch.arange(10) % 3)
    model = nn.Linear(4, 3)

    def ask(**options: bool) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            predict(model, "mean", DataLoader(data, batch_size=4, **options))
        return [str(w.message) for w in caught]

    assert any("shuffle=False" in message for message in ask(shuffle=True))
    assert any("leaves out the last 2" in message for message in ask(drop_last=True))
    assert not ask()
