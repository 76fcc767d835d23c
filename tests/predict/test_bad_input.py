"""Arguments that make no sense: an error that names them, and nothing changed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior
from credo.predict import Batch, Functions, predict
from tests.predict.models import around, mlp, rows


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"samples": 0}, InvalidValue, "samples"),
        ({"samples": -1}, InvalidValue, "samples.*-1"),
        ({"samples": "10"}, InvalidType, "samples"),
        ({"samples": True}, InvalidType, "samples"),
        ({"samples": 1.5}, InvalidType, "samples"),
        ({"samples": None}, InvalidType, "samples"),
        ({"seed": -1}, InvalidValue, "seed"),
        ({"seed": 2**64}, InvalidValue, "seed"),
        ({"seed": None}, InvalidType, "seed"),
        ({"batch_size": 0}, InvalidValue, "batch_size"),
        ({"task": "ranking"}, InvalidValue, "'ranking'"),
        ({"noise": 1.0}, InvalidValue, "task='regression'"),
        ({"posterior": "Mean"}, InvalidType, "'mean'"),
        ({"posterior": None}, InvalidType, "None"),
        ({"posterior": {"w": torch.ones(1)}}, InvalidType, "posterior"),
        ({"model": print}, InvalidType, "model"),
        ({"model": nn.Linear(4, 3)}, InvalidValue, "the model has no '1.weight'"),
    ],
)
def test_bad_arguments(change: dict[str, object], error: type[Exception], word: str) -> None:
    model = mlp()
    state = torch.get_rng_state()
    arguments = {"model": model, "posterior": around(model), "inputs": rows()} | change
    with pytest.raises(error, match=word):
        predict(**arguments)  # type: ignore[call-overload]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_posterior_of_another_shape() -> None:
    model = nn.Linear(4, 3)
    q = DiagonalPosterior({"weight": torch.ones(3, 5)}, {})
    with pytest.raises(InvalidValue, match=r"'weight' is \(3, 5\) in the posterior, \(3, 4\) in the model"):
        predict(model, q, rows())


class Returns(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.fc, self.output = nn.Linear(4, 3), output

    def forward(self, x: Tensor) -> object:
        return self.output


@pytest.mark.parametrize(
    ("output", "error", "word"),
    [
        (torch.ones(6), InvalidValue, r"\(6,\)"),
        (torch.ones(()), InvalidValue, r"\(\)"),
        (torch.ones(6, 3, 1), InvalidValue, r"\(6, 3, 1\).*class_dim"),
        (torch.ones(2, 6, 3), InvalidValue, "6 examples and answered with 2 rows"),
        (torch.ones(6, 2, dtype=torch.int64), InvalidType, "int64"),
        (torch.ones(6, 1), InvalidValue, "two logits"),
        ((torch.ones(6, 2), torch.ones(6, 2)), InvalidType, "tuple"),
        (None, InvalidType, "NoneType"),
    ],
)
@pytest.mark.parametrize("posterior", ["mean", "sampled"])
def test_outputs_that_are_no_logits(
    output: object, error: type[Exception], word: str, posterior: str
) -> None:
    model = Returns(output)
    with pytest.raises(error, match=word):
        predict(model, "mean" if posterior == "mean" else around(model), rows())


class Committee:
    """A posterior that is no Gaussian: the protocol that dropout and ensembles use."""

    def __init__(self, *members: nn.Module) -> None:
        self.members = members

    def functions(self, model: nn.Module, samples: int, seed: int, read, vectorise) -> Functions:  # type: ignore[no-untyped-def]
        def answers(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
            for member in self.members:
                yield tuple(t[None] for t in read(batch.call(member)))

        return answers


def test_whatever_draws_functions_is_a_posterior() -> None:
    members = [mlp() for _ in range(3)]
    found = predict(members[0], Committee(*members), rows())
    with torch.no_grad():
        truth = torch.stack([member(rows()).softmax(-1) for member in members]).mean(0)
    torch.testing.assert_close(found.probs, truth)
