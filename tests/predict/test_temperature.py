"""The temperature divides the logits of every sample, before the softmax."""

import math

import pytest
import torch

from credo.errors import InvalidType, InvalidValue
from credo.predict import predict
from tests.predict.models import around, generator, mlp, rows


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1, 3.0])
def test_it_divides_the_logits_of_every_sample(temperature: float, vectorise: bool) -> None:
    model = mlp()
    q = around(model)
    found = predict(
        model, q, rows(), samples=4, temperature=temperature, keep_samples=True, vectorise=vectorise
    )
    draws = q.sample_many(generator(0), 4)
    with torch.no_grad():
        each = torch.stack(
            [
                torch.func.functional_call(model, {name: w[k] for name, w in draws.items()}, (rows(),))
                for k in range(4)
            ]
        )
    truth = (each / temperature).softmax(-1)
    torch.testing.assert_close(found.samples, truth)
    torch.testing.assert_close(found.probs, truth.mean(0))
    torch.testing.assert_close(found.entropy, torch.special.entr(truth.mean(0)).sum(-1))
    torch.testing.assert_close(found.expected_entropy, torch.special.entr(truth).sum(-1).mean(0))


def test_one_changes_no_bit() -> None:
    model = mlp()
    q = around(model)
    assert torch.equal(predict(model, q, rows(), temperature=1.0).probs, predict(model, q, rows()).probs)


@pytest.mark.parametrize(
    ("temperature", "error"),
    [(0, InvalidValue), (-1.0, InvalidValue), (math.inf, InvalidValue), (math.nan, InvalidValue)]
    + [(value, InvalidType) for value in (None, "1", True, torch.ones(2))],
)
def test_it_is_a_positive_number(temperature: object, error: type[Exception]) -> None:
    model = mlp()
    with pytest.raises(error, match="temperature"):
        predict(model, "mean", rows(), temperature=temperature)  # type: ignore[call-overload]


def test_regression_has_noise_instead() -> None:
    with pytest.raises(InvalidValue, match=r"temperature=2.*noise="):
        predict(mlp(), "mean", rows(), task="regression", temperature=2.0)
