"""Vectorised and looped predictions are the same, and which one runs follows from shapes alone."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.models import LeNet5
from credo.posterior import DiagonalPosterior
from credo.posterior.model_copy import StandIn
from credo.predict import draws, predict, sampled
from credo.predict.inputs import Batch
from credo.predict.outputs import logits
from credo.predict.plan import LOOP, Meter, Plan, choose
from credo.predict.vectorise import _product, run_together
from tests.predict.models import CASES, around, images, mlp, rows


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    seen: list[Plan] = []

    def spy(*args: object, **options: object) -> Plan:
        seen.append(choose(*args, **options))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(sampled, "choose", spy)
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
    monkeypatch.setattr(draws, "LIMIT", limit)
    found = predict(model, q, rows(), samples=9, vectorise=vectorise, keep_samples=True).samples
    assert truth is not None
    torch.testing.assert_close(found, truth)


def test_the_benchmarked_networks_are_vectorised(plans: list[Plan]) -> None:
    lenet, perceptron = LeNet5(), nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    predict(lenet, around(lenet), torch.zeros(32, 3, 32, 32), samples=32)
    predict(perceptron, around(perceptron), torch.zeros(32, 784), samples=32)
    assert plans == [Plan(16, channels_last=True), Plan(32)]


def test_wide_convolutions_on_large_images_stay_a_loop(plans: list[Plan]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 30 * 30, 2))
    predict(model, around(model), torch.zeros(4, 3, 32, 32), samples=8)
    assert plans == [LOOP]


def test_hooks_keep_the_loop_and_see_ordinary_tensors(plans: list[Plan]) -> None:
    model, seen = mlp(), list[int]()
    model.register_forward_hook(lambda module, args, output: seen.append(output.dim()))
    predict(model, around(model), rows(), samples=8, vectorise=True)
    assert plans == [LOOP]
    assert seen == [2] * 8


def test_operations_without_a_rule_are_found() -> None:
    meter = Meter()
    with torch.no_grad(), meter:
        torch.histc(torch.ones(3))
    assert not meter.batchable


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


def test_draws_are_kept_for_the_next_prediction_only_while_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    q = around(model)
    drawn = []
    original = DiagonalPosterior.sample_many
    monkeypatch.setattr(
        DiagonalPosterior, "sample_many", lambda self, g, n: (drawn.append(n), original(self, g, n))[1]
    )
    first = predict(model, q, rows(), samples=5).probs
    assert torch.equal(predict(model, q, rows(), samples=5).probs, first)
    assert drawn == [5]
    predict(model, q, rows(), samples=5, seed=1)
    predict(model, around(model), rows(), samples=5, seed=1)
    assert drawn == [5, 5, 5]
    q.mean["1.bias"].add_(1.0)  # nobody should, but the numbers must follow
    assert not torch.equal(predict(model, q, rows(), samples=5).probs, first)


def test_kept_draws_are_freed_with_their_posterior() -> None:
    model = mlp()
    predict(model, around(model), rows())
    gc.collect()
    assert draws._last._entry is None


def test_a_model_that_writes_to_its_weights_does_not_spoil_the_next_prediction() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return super().forward(x)

    model = Clamps(4, 3)
    q = around(model)
    first = predict(model, q, rows(), samples=4, vectorise=False).probs
    assert torch.equal(predict(model, q, rows(), samples=4, vectorise=False).probs, first)


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
    monkeypatch.setattr(sampled, "SMALL_ANSWERS", small)
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
def test_linear_layers_of_many_functions(unknown: tuple[str, ...]) -> None:
    """Also where there are no draws of a parameter, which is then the model's for all functions."""
    model = Linears().double()
    stand_in, x, whole = StandIn(model), rows(6).double(), around(model)
    draws = {n: t for n, t in whole.sample_many(None, 9).items() if n not in unknown}
    with torch.no_grad():
        (together,) = run_together(stand_in, draws, Batch((x,)), logits, channels_last=False)
        for k, answer in enumerate(together):
            stand_in.load({name: stack[k] for name, stack in draws.items()})
            torch.testing.assert_close(answer, stand_in.module(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_a_product_finds_the_functions_wherever_they_are(place: int | None) -> None:
    weights, biases, own = torch.randn(6, 3, 4), torch.randn(6, 3), torch.randn(6, 5, 4)
    rows = own[0] if place is None else own.movedim(0, place)
    found, at = _product((rows, weights, biases), (place, 0, 0))
    assert at == 0
    for k in range(6):
        truth = F.linear(own[0 if place is None else k], weights[k], biases[k])
        torch.testing.assert_close(found[k], truth, rtol=1e-4, atol=1e-5)
