"""Vectorised and looped predictions are the same, and which one runs follows from shapes alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.models import LeNet5
from credo.posterior import DiagonalPosterior
from credo.predict import functions, predict
from credo.predict.functions import SampledFunctions
from credo.predict.inputs import Batch
from tests.predict.models import CASES, around, images, mlp, rows


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many functions ran at a time, prediction by prediction."""
    seen: list[int] = []
    number = SampledFunctions._number

    def spy(self: SampledFunctions, batch: Batch) -> int:
        seen.append(number(self, batch))
        return seen[-1]

    monkeypatch.setattr(SampledFunctions, "_number", spy)
    return seen


@pytest.mark.parametrize("kind", CASES)
def test_equal_numbers_either_way(kind: str) -> None:
    make, inputs = CASES[kind]
    model = make()
    q, x = around(model), inputs(6)
    loop, auto, forced = (predict(model, q, x, samples=9, vectorise=v) for v in (False, None, True))
    torch.testing.assert_close(auto.probs, loop.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(forced.probs, loop.probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 2000, 10**9])
@pytest.mark.parametrize("vectorise", [False, True])
def test_numbers_do_not_depend_on_memory_limits(
    monkeypatch: pytest.MonkeyPatch, limit: int, vectorise: bool
) -> None:
    model = mlp()
    q = around(model)
    truth = predict(model, q, rows(), samples=9, vectorise=False, keep_samples=True).samples
    monkeypatch.setattr(functions, "STACKED", limit)
    found = predict(model, q, rows(), samples=9, vectorise=vectorise, keep_samples=True).samples
    assert truth is not None
    torch.testing.assert_close(found, truth)


def test_networks_of_linear_layers_run_together_and_convolutions_in_turn(numbers: list[int]) -> None:
    lenet, perceptron = LeNet5(), nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    predict(lenet, around(lenet), torch.zeros(32, 3, 32, 32), samples=32)
    predict(perceptron, around(perceptron), torch.zeros(32, 784), samples=32)
    assert numbers == [1, 32]


def test_wide_convolutions_on_large_images_stay_a_loop(numbers: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 30 * 30, 2))
    predict(model, around(model), torch.zeros(4, 3, 32, 32), samples=8)
    assert numbers == [1]


def test_hooks_keep_the_loop_and_see_ordinary_tensors(numbers: list[int]) -> None:
    model, seen = mlp(), list[int]()
    model.register_forward_hook(lambda module, args, output: seen.append(output.dim()))
    predict(model, around(model), rows(), samples=8, vectorise=True)
    assert numbers == [1]
    assert seen == [2] * 8


def test_a_model_that_vmap_cannot_run_falls_back() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return y if y.sum().item() > 0 else -y

    model = Branches()
    q = around(model)
    loop = predict(model, q, rows(), samples=8, vectorise=False)
    torch.testing.assert_close(predict(model, q, rows(), samples=8, vectorise=True).probs, loop.probs)


def test_a_vectorised_answer_that_disagrees_is_not_used() -> None:
    """Writing through a view that had to be a copy: vectorised in channels_last, the write would be lost."""

    class WritesThroughView(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 49, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y.view(len(y), -1).mul_(3.0)
            return self.fc(y.flatten(1))

    model = WritesThroughView()
    q = around(model)
    loop = predict(model, q, images(), samples=8, vectorise=False)
    torch.testing.assert_close(predict(model, q, images(), samples=8, vectorise=True).probs, loop.probs)


def test_errors_of_the_model_come_through_as_they_are() -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        predict(model, around(model), torch.ones(2, 5), samples=8)


def test_draws_are_kept_for_the_next_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    q = around(model)
    drawn = []
    original = DiagonalPosterior.sample_many
    monkeypatch.setattr(
        DiagonalPosterior, "sample_many", lambda self, g, n: (drawn.append(n), original(self, g, n))[1]
    )
    whole = predict(model, q, rows(), samples=5).probs
    assert drawn == [5]
    parts = predict(model, q, rows(), samples=5, batch_size=2).probs
    torch.testing.assert_close(parts, whole)
    assert drawn == [5, 5]
    q.mean["1.bias"].add_(1.0)  # nobody should, but the numbers must follow
    assert not torch.equal(predict(model, q, rows(), samples=5).probs, whole)


def test_a_model_that_writes_to_its_weights_does_not_spoil_the_next_prediction() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return super().forward(x)

    model = Clamps(4, 3)
    q = around(model)
    for vectorise in (False, None, True):
        first = predict(model, q, rows(), samples=4, vectorise=vectorise).probs
        assert torch.equal(predict(model, q, rows(), samples=4, vectorise=vectorise).probs, first)
        twice = predict(model, q, [rows(), rows()], samples=4, vectorise=vectorise).probs
        torch.testing.assert_close(twice, torch.cat([first, first]))  # nor the next batch


class Reuses(nn.Module):
    """Answers in the same memory at every call, as a captured graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.kept = nn.Linear(4, 3), torch.empty(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.kept[: len(x)] = self.fc(x)
        return self.kept[: len(x)]


@pytest.mark.parametrize("small", [1, 100, 10**6], ids=["each by itself", "two", "all"])
def test_answers_that_wait_for_each_other_are_their_own(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(functions, "SMALL_ANSWERS", small)
    model, x = Reuses(), rows(5)
    found = predict(model, around(model), x, samples=7, vectorise=False, keep_samples=True).samples
    draws = around(model).sample_many(torch.Generator().manual_seed(0), 7)
    truth = torch.baddbmm(
        draws["fc.bias"].unsqueeze(1), x.expand(7, 5, 4), draws["fc.weight"].transpose(1, 2)
    )
    assert found is not None
    torch.testing.assert_close(found, truth.softmax(-1))


class Linears(nn.Module):
    """Linear layers in all the ways that a batched product must tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bare, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x) + self.bare(x)
        sequence = self.first(torch.stack([rows, x], 1))  # (M, 2, 4)
        single = self.last(rows[0])
        named = F.linear(rows, weight=self.last.weight, bias=self.last.bias)
        return self.last(sequence).sum(1) + single + named + F.linear(rows.T.contiguous().T, self.last.weight)


@pytest.mark.parametrize("unknown", [(), ("first.bias",), ("last.weight",), ("last.weight", "last.bias")])
def test_linear_layers_of_many_functions(numbers: list[int], unknown: tuple[str, ...]) -> None:
    """Also where there are no draws of a parameter, which is then the model's for all functions."""
    model = Linears().double()
    whole = around(model)
    q = DiagonalPosterior(
        {name: t for name, t in whole.mean.items() if name not in unknown},
        {name: t for name, t in whole.variance.items() if name not in unknown},
    )
    together, loop = (
        predict(model, q, rows(6).double(), samples=9, vectorise=v, keep_samples=True).samples
        for v in (None, False)
    )
    assert numbers == [9, 1]
    assert together is not None
    torch.testing.assert_close(together, loop, rtol=1e-10, atol=1e-12)
