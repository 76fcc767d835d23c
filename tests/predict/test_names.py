"""The same network under other names: matched where there is one way, refused by name elsewhere."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import credo
from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior
from tests.predict.models import Net, around, images, mlp, rows


def deep() -> nn.Module:
    """Layers of one shape, so that shapes alone say little."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def trained(model: nn.Module, params: object, optimiser: type = credo.VOGN) -> DiagonalPosterior:
    optimizer = optimiser(params, data_size=6)
    for _ in range(2):
        with optimizer.sampled():
            F.cross_entropy(model(rows()), torch.arange(6) % 3).backward()
        optimizer.step()
    return optimizer.posterior()


GIVEN: dict[str, Callable[[nn.Module], object]] = {
    "parameters": lambda m: m.parameters(),
    "list": lambda m: list(m.parameters()),
    "groups": lambda m: [{"params": m[0].parameters()}, {"params": m[2:].parameters()}],  # type: ignore[index]
    "trainable": lambda m: [p for p in m.parameters() if p.requires_grad],
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("optimiser", [credo.VOGN, credo.IVON, credo.BayesByBackprop])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_without_names_are_those_of_the_model_in_order(
    given: str, optimiser: type, frozen: bool
) -> None:
    model = deep()
    if frozen:
        model[2].requires_grad_(False)  # type: ignore[index]
    q = trained(model, GIVEN[given](model), optimiser)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.startswith("parameter_") for name in q.mean)
    named = DiagonalPosterior(
        dict(zip(trainable, q.mean.values(), strict=True)),
        dict(zip(trainable, q.variance.values(), strict=True)),
    )
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for p in fresh.parameters():
            if p.requires_grad:
                p.zero_()
    for other in (model, fresh):
        assert torch.equal(credo.predict(other, q, rows()).probs, credo.predict(other, named, rows()).probs)


def test_another_order_is_found_by_the_values_and_refused_without_them() -> None:
    model = deep()
    q = trained(model, [*model[4].parameters(), *model[2].parameters(), *model[0].parameters()])  # type: ignore[index]
    order = ["4.weight", "4.bias", "2.weight", "2.bias", "0.weight", "0.bias"]
    named = DiagonalPosterior(
        dict(zip(order, q.mean.values(), strict=True)), dict(zip(order, q.variance.values(), strict=True))
    )
    assert torch.equal(credo.predict(model, q, rows()).probs, credo.predict(model, named, rows()).probs)
    with pytest.raises(InvalidValue, match=r"no names.*parameter_0.*named_parameters\(\)"):
        credo.predict(deep(), q, rows())


def test_draws_that_are_kept_are_not_used_under_other_names() -> None:
    model = deep()
    q = trained(model, model.parameters())
    other = copy.deepcopy(model)
    other[0], other[2] = other[2], other[0]  # type: ignore[index]
    credo.predict(model, q, rows())
    found, afresh = (credo.predict(other, p, rows()).probs for p in (q, copy.deepcopy(q)))
    assert torch.equal(found, afresh)
    assert not torch.equal(found, credo.predict(model, q, rows()).probs)


def test_a_part_of_the_parameters_is_found_by_the_values_and_refused_without_them() -> None:
    """parameter_0 has the shape of three layers; the first of them would be the wrong one."""
    model = deep()
    q = trained(model, model[2].parameters())  # type: ignore[index]
    named = DiagonalPosterior(
        {"2.weight": q.mean["parameter_0"], "2.bias": q.mean["parameter_1"]},
        {"2.weight": q.variance["parameter_0"], "2.bias": q.variance["parameter_1"]},
    )
    assert torch.equal(credo.predict(model, q, rows()).probs, credo.predict(model, named, rows()).probs)
    with pytest.raises(InvalidValue, match="no names"):
        credo.predict(deep(), q, rows())


class Holder(nn.Module):
    """As a LightningModule holds its network."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x)


@pytest.mark.parametrize("wrap", [AveragedModel, nn.DataParallel, Holder], ids=lambda wrap: wrap.__name__)
def test_wrappers_are_seen_through_both_ways(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    q, truth = around(model), credo.predict(model, around(model), rows()).probs
    assert torch.equal(credo.predict(wrap(model), q, rows()).probs, truth)
    outside = dict(wrap(model).named_parameters())
    inner = DiagonalPosterior(outside, {name: torch.full_like(p, 0.05) for name, p in outside.items()})
    assert torch.equal(credo.predict(model, inner, rows()).probs, truth)


def test_buffers_follow_the_names() -> None:
    model = Net()
    model(4 + images())
    q, fresh = around(model).with_buffers(model), AveragedModel(Net())
    assert torch.equal(credo.predict(fresh, q, images()).probs, credo.predict(model, q, images()).probs)


def test_two_places_that_fit_are_told_apart_by_their_values_or_refused() -> None:
    first, second = mlp(), mlp()
    q = around(second)
    found = credo.predict(
        Holder(first, second), q, rows()
    ).probs  # `second` is not called: only the weights show
    torch.testing.assert_close(found, credo.predict(first, "mean", rows()).probs)
    with pytest.raises(InvalidValue, match=r"fits parts\.0\.…, parts\.1\.….*credo.VOGN\(model"):
        credo.predict(Holder(mlp(), mlp()), q, rows())


def test_names_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"the model has no 'fc.weight'"):
        credo.predict(mlp(), DiagonalPosterior({"fc.weight": torch.ones(2, 2)}, {}), rows())
    with pytest.raises(InvalidValue, match="6 parameters"):
        credo.predict(deep(), DiagonalPosterior({"parameter_0": torch.ones(2, 2)}, {}), rows())


def test_an_object_that_holds_a_module_is_named() -> None:
    class Trainer:
        module_ = mlp()

    with pytest.raises(InvalidType, match=r"got Trainer; it holds one: pass its \.module_"):
        credo.predict(Trainer(), "mean", rows())  # type: ignore[call-overload]
