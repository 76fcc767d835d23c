"""Arrays and dicts as they come from elsewhere: read as they are meant, or refused by name."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue
from credo.predict import predict
from tests.predict.models import around, rows
from tests.predict.test_tasks import Shaped


@pytest.mark.parametrize(
    "form", ["array", "float64", "list of arrays", "pairs", "dict", "tuple", "big-endian"]
)
def test_arrays_go_in(form: str) -> None:
    model = Shaped(3)
    q, x = around(model), rows().numpy()
    inputs = {
        "array": x,
        "float64": x.astype(np.float64),
        "list of arrays": [x[:4], x[4:]],
        "pairs": [(x[:4], np.zeros(4)), (x[4:], np.zeros(2))],
        "dict": {"x": x, "labels": np.zeros(6)},
        "tuple": (x[::-1][::-1],),
        "big-endian": x.astype(">f4"),
    }[form]
    torch.testing.assert_close(predict(model, q, inputs).probs, predict(model, q, rows()).probs)


def test_arrays_take_the_dtype_of_the_model_and_integers_stay() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    tokens = np.arange(12).reshape(6, 2) % 9
    assert predict(model, "mean", tokens).probs.dtype == torch.float64
    assert predict(Shaped(3).double(), "mean", rows().numpy()).probs.dtype == torch.float64
    targets = np.arange(6) % 3
    found = predict(Shaped(3), "mean", rows())
    scores = [credo.evaluate(found, given)["nll"] for given in (targets, torch.from_numpy(targets))]  # type: ignore[arg-type]
    assert scores[0] == scores[1]


def test_a_target_of_another_name() -> None:
    model = Shaped(3)
    truth = predict(model, "mean", rows()).probs
    batches = [{"x": part, "digit": torch.zeros(len(part))} for part in rows().split(4)]
    torch.testing.assert_close(predict(model, "mean", batches, target="digit").probs, truth)
    torch.testing.assert_close(predict(model, "mean", [{"x": rows(), "y": 0}]).probs, truth)
    found = credo.calibrate(model, "mean", [{"x": rows(), "digit": torch.arange(6) % 3}], target="digit")
    assert found.nll_after <= found.nll_before
    with pytest.raises(InvalidValue, match=r"'digit', which Shaped.forward\(x.*target='digit'"):
        predict(model, "mean", batches)
    with pytest.raises(InvalidValue, match="target='number' names nothing in the batch, which has x, digit"):
        predict(model, "mean", batches, target="number")
    with pytest.raises(InvalidType, match="target must be the name"):
        predict(model, "mean", batches, target=3)  # type: ignore[call-overload]


class Coordinates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.fc(x + y) * scale


def test_y_is_an_argument_where_the_model_takes_it() -> None:
    model = Coordinates()
    truth = predict(model, "mean", (rows(), rows())).probs
    torch.testing.assert_close(predict(model, "mean", {"x": rows(), "y": rows()}).probs, truth)
    with pytest.raises(InvalidType, match=r"Coordinates.forward\(x.*missing a required argument: 'y'"):
        predict(model, "mean", {"x": rows()})
    with pytest.raises(InvalidType, match="too many positional"):
        predict(model, "mean", (rows(), rows(), rows()))
