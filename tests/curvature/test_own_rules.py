"""Operations of a user's own: with a rule they register, and without one."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.curvature.rules import registry
from tests.curvature.oracle import relative_error


@torch.library.custom_op("credo_tests::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, g):
    x, w = ctx.saved_tensors
    return g * w, (g * x).sum(0)


scale.register_autograd(_backward, setup_context=_save)


class Scale(credo.Operation):
    name, parameter_slots = "scale", frozenset({1})
    calls = 0

    def __init__(self, x, w):
        self.tensors = (x, w)
        self.count_examples(x)

    def forward(self, x, w):
        return torch.ops.credo_tests.scale(x, w), ()

    def backward(self, grads, needed, examples, saved):
        x, w = saved
        Scale.calls += 1
        return grads[0] * w, credo.Stacked(grads[0] * x)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(registry._RULES)
    credo.register_rule(torch.ops.credo_tests.scale, torch.ops.credo_tests.scale.default)(Scale)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 4).double())

    def forward(self, x):
        return torch.ops.credo_tests.scale(x, self.w)


def squares_and_truth() -> tuple[Tensor, Tensor]:
    model, x = Model(), torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = credo.squared_gradients(model, lambda: model(x).sin().sum(1).mean())["w"]
    return squares, (x * (x * model.w).cos()).detach().square().sum(0)


def test_without_a_rule_the_answer_is_exact_all_the_same():
    squares, truth = squares_and_truth()
    assert relative_error(squares, truth) < 1e-12


def test_a_registered_rule_is_used(registered):
    before = Scale.calls
    squares, truth = squares_and_truth()
    assert relative_error(squares, truth) < 1e-12
    assert Scale.calls == before + 1


class Spoken(Scale):
    """With attributes that many an operation has, and an opinion on whether there are examples."""

    asked = 0

    def __init__(self, x, w):
        super().__init__(x, w)
        self.order, self.sources, self.ledger, self.examples = 3, "sources", "ledger", 5

    def forward(self, x, w):
        assert (self.order, self.sources, self.ledger, self.examples) == (3, "sources", "ledger", 5)
        return super().forward(x, w)

    def has_no_examples(self, provenance):
        Spoken.asked += 1
        return False


def test_attributes_of_a_rule_are_its_own_and_what_it_overrides_is_asked(registered):
    credo.register_rule(torch.ops.credo_tests.scale, torch.ops.credo_tests.scale.default)(Spoken)
    before = Spoken.asked
    squares, truth = squares_and_truth()
    assert relative_error(squares, truth) < 1e-12
    assert Spoken.asked == before + 1
