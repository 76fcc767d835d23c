"""What a parameter becomes before it meets the examples: exact, or refused with nothing changed."""

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.errors import CredoError, UnsupportedOperation
from tests.curvature.oracle import mean_loss, relative_error, squares_by_loop, target_for
from tests.curvature.programs import EXACT, REFUSED, D, M, Model

BATCHES = pytest.mark.parametrize("examples", [M, 2, 1])


def build(program, examples: int) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(program).double()
    for name in ("turn", "mask", "scale", "layers"):
        setattr(model.tensors, name, getattr(model.tensors, name).double())
    return model, torch.randn(examples, D, dtype=torch.float64)


@BATCHES
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT.keys())
def test_legitimate_programs_have_the_squares_of_the_loop(program, examples):
    model, x = build(program, examples)
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    with credo.capture(model) as stats:
        mean_loss(model(x), target).backward()
    assert stats.examples == examples
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert used
    for name, parameter in used.items():
        assert relative_error(stats.squares[parameter], truth[name]) < 1e-10, name


@pytest.mark.parametrize(("program", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_rows_that_are_no_examples_are_refused(program, message):
    model, x = build(program, M)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedOperation, match=message), credo.capture(model) as stats:
        model(x).square().sum().backward()
    assert stats.examples == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("examples", [2, 1])
@pytest.mark.parametrize("program", [program for program, _ in REFUSED.values()], ids=REFUSED.keys())
def test_no_batch_size_makes_them_silently_wrong(program, examples):
    model, x = build(program, examples)
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target) if examples == 1 else None
    try:
        with credo.capture(model) as stats:
            mean_loss(model(x), target).backward()
    except CredoError:
        assert all(p.grad is None for p in model.parameters())
        return
    assert truth is not None  # one example cannot mix with others
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert relative_error(stats.squares[parameter], truth[name]) < 1e-10, name


def test_a_normalisation_by_hand_mixes_examples_as_batch_norm_does():
    torch.manual_seed(0)
    layer, norm = torch.nn.Linear(D, D).double(), torch.nn.BatchNorm1d(D, affine=False).double()
    x = torch.randn(M, D, dtype=torch.float64)
    squares = []
    for normalised in (norm, lambda h: (h - h.mean(0)) / (h.var(0, unbiased=False) + norm.eps).sqrt()):
        with credo.capture(layer, "sum") as stats:
            normalised(layer(x)).pow(3).sum().backward()
        squares.append(stats.squares[layer.weight])
    assert relative_error(squares[1], squares[0]) < 1e-10


def test_data_that_a_buffer_meets_by_name_are_no_constant():
    model, x = build(lambda m, x: F.linear(torch.mul(m.known[0], other=x), m.weight), M)
    with credo.capture(model) as stats:
        model(x).square().sum(1).mean().backward()
    assert stats.examples == M
    assert model.tensors.weight in stats.squares


def test_distances_between_many_examples_are_refused_too():
    """torch computes those of more than 25 rows by a product."""
    model, x = build(lambda m, x: torch.cdist(m.inner(x), m.inner(x)), 30)
    with pytest.raises(UnsupportedOperation, match="EuclideanDist"), credo.capture(model):
        model(x).sum().backward()
