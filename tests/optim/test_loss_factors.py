"""Losses that a loop multiplies, and gradients that it clears or unscales: right, or refused by name."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import CallOrderError, CredoError, InvalidValue, TrainingWarning, UnsupportedOperation

METHODS = ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop")
SQUARES = ("VOGN", "OGN", "KFAC", "NoisyKFAC")
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def build(method: str, model: nn.Module, **settings):
    return getattr(credo, method)(model, data_size=16, lr=0.05, **settings)


def mean_of(model: nn.Module, rows: slice | Tensor = slice(None)) -> Tensor:
    return F.cross_entropy(model(X[rows]), Y[rows])


def untouched(model: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), network().parameters(), strict=True))


# A mean times the number of its examples


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [16, torch.tensor(16)], ids=["int", "tensor"])
def test_a_mean_times_the_number_of_examples_is_refused(method, number):
    model = network()
    optimizer = build(method, model)
    with pytest.raises(UnsupportedOperation, match=r"multiplied by 16, their number.*losses\)\.mean\(\)"):
        optimizer.step(lambda: mean_of(model) * number)
    assert untouched(model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("times", [(16.0,), (4.0, 4.0), (4, 4)], ids=["16.0", "4.0 * 4.0", "4 * 4"])
def test_a_constant_of_that_value_is_part_of_the_losses_with_a_warning(method, times):
    """The squared temperature of a distillation, 4.0 ** 2, and sixteen examples."""

    model, twin = network().double(), network().double()
    X64 = X.double()
    optimizer, reference = build(method, model), build(method, twin)

    def of(network: nn.Module) -> Tensor:
        found = F.cross_entropy(network(X64), Y)
        for factor in times:
            found = found * factor
        return found

    with pytest.warns(TrainingWarning, match=r"multiplied by 16.0, which is taken for a constant"):
        optimizer.step(lambda: of(model))
    reference.step(lambda: (16 * F.cross_entropy(twin(X64), Y, reduction="none")).mean())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        optimizer.step(lambda: of(model))  # said once


@pytest.mark.parametrize("method", SQUARES)
@pytest.mark.parametrize(
    "loss",
    [
        lambda m: 16 * F.cross_entropy(m(X), Y, label_smoothing=0.1),
        lambda m: F.cross_entropy(m(X), Y, reduction="sum") / 16 * 16,
        lambda m: (mean_of(m) + 0.1 * m(X).square().mean()) * len(X),
        lambda m: F.cross_entropy(m(X), torch.where(Y > 0, Y, -100)) * len(X),
    ],
    ids=["smoothed", "divided and multiplied", "two terms", "over some"],
)
def test_other_ways_to_write_it(method, loss):
    model = network()
    with pytest.raises(UnsupportedOperation, match="their number"):
        build(method, model).step(lambda: loss(model))


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_that_was_there_before_is_no_number_of_examples(method):
    """2 * loss, whose last batch has two examples."""
    model = network()
    optimizer = build(method, model)
    for rows in (slice(0, 7), slice(7, 14), slice(14, 16)):
        optimizer.step(lambda rows=rows: 2 * mean_of(model, rows))
    assert optimizer.counters["step"] == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_over_one_example_has_no_number_of_examples(method):
    model = network()
    optimizer = build(method, model)
    optimizer.step(lambda: 1.0 * mean_of(model, slice(0, 1)))
    mask = torch.arange(16) == 3
    if "KFAC" not in method:  # its factors are over all examples
        optimizer.step(lambda: (F.cross_entropy(model(X), Y, reduction="none") * mask).sum() / mask.sum())
    assert not optimizer.counters["refused"]


def test_what_belongs_to_the_losses_or_is_declared_is_taken():
    model = network()
    with credo.capture(model) as stats:
        (16 * F.cross_entropy(model(X), Y, reduction="none")).mean().backward()
    own = torch.zeros_like(model[2].bias)
    for i in range(16):
        own += torch.autograd.grad(16 * mean_of(model, slice(i, i + 1)), model[2].bias)[0].square()
    torch.testing.assert_close(stats.squares[model[2].bias], own)
    with credo.capture(model, "sum") as summed:
        (mean_of(model) * 16).backward()
    torch.testing.assert_close(summed.squares[model[2].bias] * 16**2, own)


@pytest.mark.parametrize("method", METHODS)
def test_the_scale_of_a_scaler_may_be_the_number_of_examples(method):
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = build(method, model)
    with optimizer.sampled():
        scaler.scale(mean_of(model)).backward()
    scaler.step(optimizer)
    assert optimizer.counters["step"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_sum_is_no_mean(method):
    """65536 times a sum over 16 examples is a million times their mean, another power of two."""
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer = build(method, model, reduction="sum")
    with optimizer.sampled():
        scaler.scale(F.cross_entropy(model(X), Y, reduction="none").sum()).backward()
    scaler.step(optimizer)
    assert optimizer.counters["step"] == 1


@pytest.mark.parametrize("method", SQUARES)
def test_a_scaled_mean_is_no_sum(method):
    model = network()
    optimizer = build(method, model, reduction="sum")
    with pytest.raises(UnsupportedOperation, match="the mean over 16 examples"):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="sum") / 16 * 1024)


# Divisions beside accumulate(n)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [4, 1])
def test_a_division_beside_accumulate_is_refused(method, size):
    model = network()
    optimizer = build(method, model)
    optimizer.accumulate(4)
    with pytest.raises(UnsupportedOperation, match=r"accumulate\(4\).*divided by 4.*without the division"):
        optimizer.step(lambda: mean_of(model, slice(0, size)) / 4)
    assert untouched(model)
    assert not optimizer.pending()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "write", [lambda loss: 0.25 * loss, lambda loss: loss / 4.0], ids=["product", "float"]
)
def test_a_factor_that_is_a_float_belongs_to_the_loss_with_a_warning(method, write):
    """0.5 * mse beside accumulate(2) is what many losses look like."""
    model, twin = network().double(), network().double()
    optimizer, reference = build(method, model), build(method, twin)
    optimizer.accumulate(4)
    X64 = X.double()

    def own(network: nn.Module, rows: slice) -> Tensor:
        return F.cross_entropy(network(X64[rows]), Y[rows], reduction="none")

    with pytest.warns(TrainingWarning, match=r"multiplied by 0.25 beside accumulate\(4\)"):
        optimizer.step(lambda: write(own(model, slice(0, 4)).mean()))
    for k in range(1, 4):
        optimizer.step(lambda k=k: write(own(model, slice(4 * k, 4 * k + 4)).mean()))
    reference.step(lambda: (0.25 * own(twin, slice(None))).mean())
    assert optimizer.counters["step"] == reference.counters["step"] == 1
    if method != "BayesByBackprop":
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_divisions_that_make_a_mean_are_none(method):
    """Sums over four examples, divided by four."""
    model = network()
    optimizer = build(method, model)
    optimizer.accumulate(4)
    for k in range(4):
        rows = slice(4 * k, 4 * k + 4)
        optimizer.step(lambda rows=rows: F.cross_entropy(model(X[rows]), Y[rows], reduction="sum") / 4)
    assert optimizer.counters["step"] == 1


# Gradients that are cleared between passes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("to_none", [True, False])
def test_clearing_between_micro_batches_is_refused(method, to_none):
    model = network()
    optimizer = build(method, model)

    def closure() -> Tensor:
        for k in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            loss = mean_of(model, slice(8 * k, 8 * k + 8)) / 2
            loss.backward()
        return loss

    with pytest.raises(CallOrderError, match="cleared between two backward passes"):
        optimizer.step(closure)
    assert untouched(model)


def test_ivon_takes_the_last_pass_alone_where_it_is_a_whole_mean():
    """Adversarial examples by a backward pass that is then cleared: IVON reads gradients at the end of its block."""

    def taught(adversarial: bool) -> nn.Module:
        model = network()
        optimizer = build("IVON", model)
        with optimizer.sampled():
            x = X.clone().requires_grad_()
            if adversarial:
                F.cross_entropy(model(x), Y).backward()
                optimizer.zero_grad()
            else:
                x.grad = torch.autograd.grad(F.cross_entropy(model(x), Y), x)[0]
            F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), Y).backward()
        optimizer.step()
        return model

    for p, q in zip(taught(True).parameters(), taught(False).parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_that_are_zero_by_themselves_were_not_cleared():
    model = network()
    optimizer = build("VOGN", model)
    with optimizer.sampled():
        (F.relu(-1 - model(X).square()).mean() / 2).backward()
        (mean_of(model) / 2).backward()
    optimizer.step()


# Means of several passes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [8, 1])
def test_several_means_in_one_block_are_refused(method, size):
    model = network()
    optimizer = build(method, model)

    def closure() -> Tensor:
        for k in range(2):
            loss = mean_of(model, slice(size * k, size * k + size))
            loss.backward()
        return loss

    with pytest.raises(InvalidValue, match="two backward passes in one block"):
        optimizer.step(closure)
    assert untouched(model)


def test_several_losses_of_one_forward_pass_have_the_gradient_of_their_sum():
    def taught(together: bool) -> nn.Module:
        model = network()
        optimizer = build("IVON", model)
        with optimizer.sampled():
            outputs = model(X)
            losses = F.cross_entropy(outputs, Y), outputs.square().mean()
            if together:
                sum(losses).backward()
            else:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
        optimizer.step()
        return model

    for p, q in zip(taught(True).parameters(), taught(False).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


# Gradients that are unscaled by hand


def divide(model: nn.Module, by: float) -> None:
    for p in model.parameters():
        p.grad /= by


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1024.0, 1000, 3.0])
@pytest.mark.parametrize("declared", [True, False])
def test_gradients_unscaled_by_hand_are_refused(method, scale, declared):
    model = network()
    optimizer = build(method, model)
    with optimizer.sampled(scale=scale if declared else None):
        (mean_of(model) * scale).backward()
    divide(model, scale)
    with pytest.raises(CallOrderError, match=r"divided by (1024|1000|3) afterwards.*sampled\(scale="):
        optimizer.step()
    assert untouched(model)


@pytest.mark.parametrize("method", [*SQUARES, "BayesByBackprop"])
def test_inside_the_closure_too(method):
    model = network()
    optimizer = build(method, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_of(model) * 1024
        loss.backward()
        divide(model, 1024)
        return loss

    with pytest.raises(CallOrderError, match=r"divided by 1024 afterwards"):
        optimizer.step(closure)


@pytest.mark.parametrize("method", METHODS)
def test_whatever_the_loss_is(method):
    model = network()
    optimizer = build(method, model, reduction="sum")
    with optimizer.sampled():
        (F.cross_entropy(model(X), Y, reduction="sum") * 512).backward()
    divide(model, 512)
    with pytest.raises(CallOrderError, match="divided by 512 afterwards"):
        optimizer.step()


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_zero_say_nothing_of_a_division(method):
    """Six parameters that the loss does not depend on stand before those that it does."""
    idle = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = nn.ModuleDict({"idle": idle, "net": network()})
    optimizer = build(method, model)
    with optimizer.sampled():
        loss = F.cross_entropy(model["net"](X) + 0 * idle(X)[:, :3], Y)
        (loss * 512).backward()
    divide(model, 512)
    with pytest.raises(CallOrderError, match="divided by 512 afterwards"):
        optimizer.step()


@pytest.mark.parametrize("method", METHODS)
def test_shares_by_the_number_of_all_examples_are_the_whole_batch(method):
    """A mean over 6 of 16 times 6/16, and one over 10 times 10/16, beside the mean over all."""
    one, two = network(), network()
    # Its noise is on the outputs of a pass, so that two passes have other noise than one.
    settings = {"initial_log_variance": -60.0} if method == "BayesByBackprop" else {}
    cut, whole = build(method, one, **settings), build(method, two, **settings)
    with cut.sampled():
        for rows in (slice(6), slice(6, 16)):
            (mean_of(one, rows) * len(X[rows]) / 16).backward()
    with whole.sampled():
        mean_of(two).backward()
    cut.step()
    whole.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_clipping_a_loss_with_a_factor_is_no_unscaling(method):
    model = network()
    optimizer = build(method, model)
    with optimizer.sampled():
        (mean_of(model) * 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.counters["step"] == 1


# Parameters that were frozen


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_thaw_are_refused_until_they_join(method):
    model = network()
    model[0].requires_grad_(False)
    optimizer = build(method, model)
    optimizer.step(lambda: mean_of(model))
    model[0].requires_grad_(True)
    before = model[2].weight.detach().clone()
    with pytest.raises(CallOrderError, match=r"'0\.weight' and 1 more did not require.*add_param_group"):
        optimizer.step(lambda: mean_of(model))
    assert torch.equal(before, model[2].weight)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    start = model[0].weight.detach().clone()
    optimizer.step(lambda: mean_of(model))
    assert not torch.equal(start, model[0].weight)


# A model without samples


def test_a_refusal_of_ivon_without_noise_is_its_own():
    """Normalisation layers have no samples; their rows are not counted, so a sum is refused."""
    model = nn.LayerNorm(3)
    optimizer = build("IVON", model, reduction="sum")
    with pytest.raises(CredoError, match="number of examples cannot be read"):
        optimizer.step(lambda: model(X[:, :3]).square().sum())
    optimizer = build("IVON", model)
    optimizer.step(lambda: model(X[:, :3]).square().mean())
    assert optimizer.counters["step"] == 1
