"""What is kept between steps: every change that makes it stale is noticed, and a step takes what is there then."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from tests.optim.trained import X, Y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(X.shape[1], 5), nn.Tanh(), nn.Linear(5, 3))


def stepped(times: int, **options: int) -> tuple[nn.Sequential, credo.VOGN]:
    model = network()
    optimizer = credo.VOGN(model, data_size=100, lr=0.01, **options)
    for _ in range(times):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: credo.VOGN) -> None:
    inputs = X.to(next(model.parameters()).dtype)
    optimizer.step(lambda: F.cross_entropy(model(inputs), Y, reduction="none"))


def freeze(model, optimizer):
    model[0].weight.requires_grad_(False)


def freeze_and_thaw(model, optimizer):
    model[0].weight.requires_grad_(False)
    step(model, optimizer)
    model[0].weight.requires_grad_(True)


def other_memory_of_a_parameter(model, optimizer):
    model[2].weight.data = model[2].weight.data.clone()


def other_layout_of_a_parameter(model, optimizer):
    model[2].weight.data = model[2].weight.data.t().contiguous().t()


def other_type_of_the_parameters(model, optimizer):
    for p in model.parameters():
        p.data = p.data.double()


def other_curvature(model, optimizer):
    own = optimizer.state[model[0].weight]
    own["curvature"] = own["curvature"] * 3


def other_momentum(model, optimizer):
    own = optimizer.state[model[2].bias]
    own["momentum"] = own["momentum"] + 1


def moved_curvature(model, optimizer):
    own = optimizer.state[model[0].weight]["curvature"]
    own.data = own.data * 2


def moved_momentum(model, optimizer):
    own = optimizer.state[model[2].weight]["momentum"]
    own.data = own.data + 1


def cleared(model, optimizer):
    optimizer.state.clear()


def without_one(model, optimizer):
    del optimizer.state[model[0].weight]


def replaced_state(model, optimizer):
    p = model[2].weight
    optimizer.state[p] = {name: value * 2 for name, value in optimizer.state[p].items()}


def loaded(model, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["curvature"] *= 2
    optimizer.load_state_dict(saved)


def joined(model, optimizer):
    model.append(nn.Linear(3, 3))
    with torch.no_grad():
        model[3].weight.copy_(torch.eye(3)), model[3].bias.zero_()
    optimizer.add_param_group({"params": list(model[3].parameters())})


def fewer_parameters(model, optimizer):
    group = optimizer.param_groups[0]
    group["params"], group["param_names"] = group["params"][1:], group["param_names"][1:]


def another_order(model, optimizer):
    group = optimizer.param_groups[0]
    group["params"].reverse()
    group["param_names"].reverse()


CHANGES = [
    freeze,
    freeze_and_thaw,
    other_memory_of_a_parameter,
    other_layout_of_a_parameter,
    other_type_of_the_parameters,
    other_curvature,
    other_momentum,
    moved_curvature,
    moved_momentum,
    cleared,
    without_one,
    replaced_state,
    loaded,
    joined,
    fewer_parameters,
    another_order,
]


def everything(optimizer: credo.VOGN) -> list[torch.Tensor]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach() for p in held] + [t for p in held for _, t in sorted(optimizer.state[p].items())]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_noticed(both_kernels, change):
    """As if nothing had ever been kept: the same steps by an optimiser that forgets before each of them."""
    kept, forgetful = stepped(3), stepped(3)
    for model, optimizer in (kept, forgetful):
        torch.manual_seed(1)
        change(model, optimizer)
    for _ in range(3):
        step(*kept)
        forgetful[1]._lists.clear()
        step(*forgetful)
    pairs = list(zip(everything(kept[1]), everything(forgetful[1]), strict=True))
    assert pairs
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_a_block_and_its_step_is_noticed(change):
    """The block has left its mark in `.grad` and in the squares, so some changes are refused: then by both."""
    outcomes = []
    for forgets in (False, True):
        model, optimizer = stepped(3)
        with optimizer.sampled():
            F.cross_entropy(model(X), Y).backward()
        torch.manual_seed(1)
        if change is not freeze_and_thaw:
            change(model, optimizer)
        if forgets:
            optimizer._lists.clear()
        try:
            optimizer.step()
            outcomes.append(everything(optimizer))
        except credo.errors.CallOrderError as error:
            outcomes.append([torch.tensor(len(str(error)))])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_the_plan_is_kept_while_nothing_changes():
    model, optimizer = stepped(2)
    step(model, optimizer)
    known = dict(optimizer._lists)
    step(model, optimizer)
    assert known
    assert optimizer._lists == known


@pytest.mark.parametrize("norms", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("where", ["weight gradient", "bias gradient", "squares", "loss"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_number_anywhere_changes_nothing(both_kernels, norms, where, bad):
    model, optimizer = stepped(0)
    if norms:
        model.append(nn.LayerNorm(3))
        optimizer = credo.VOGN(model, data_size=100, lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    before = [tensor.clone() for tensor in everything(optimizer)]

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        poisoned = {
            "weight gradient": model[2].weight.grad,
            "bias gradient": list(model.parameters())[-1].grad,
        }
        if where in poisoned:
            poisoned[where].view(-1)[-1] = bad
        return loss * bad if where == "loss" else loss

    if where == "squares":
        with optimizer.sampled():
            closure()
        optimizer._gathered.squares[id(model[0].bias)][-1] = bad
        optimizer.step()
    else:
        optimizer.step(closure)
    assert optimizer.counters["refused"] == 1
    assert all(torch.equal(one, other) for one, other in zip(before, everything(optimizer), strict=True))


@pytest.mark.parametrize("together", [True, False], ids=["one group", "two groups"])
def test_a_bad_gradient_without_squares_refuses_the_step_too(together):
    model = network()
    first, second = ([{"params": list(part.parameters())}] for part in (model[0], model[2]))
    groups = [{"params": list(model.parameters())}] if together else first + second
    optimizer = credo.VOGN(groups, data_size=100, lr=0.01)
    step(model, optimizer)
    F.cross_entropy(model(X), Y).backward()
    optimizer.supply({p: p.grad**2 for p in model[0].parameters()}, 6)
    model[2].bias.grad[0] = float("nan")
    before = [tensor.clone() for tensor in everything(optimizer)]
    optimizer.step()
    assert optimizer.counters["refused"] == 1
    assert all(torch.equal(one, other) for one, other in zip(before, everything(optimizer), strict=True))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", ["curvature", "momentum"])
def test_state_that_moves_amid_a_closure_is_updated_where_it_is(both_kernels, name, samples):
    """The means are away then, in backups that only the plan at the draw knew of."""
    results = []
    for moves in (False, True):
        model, optimizer = stepped(3, mc_samples=samples)

        def closure(model=model, optimizer=optimizer, moves=moves):
            losses = F.cross_entropy(model(X), Y, reduction="none")
            for p in model.parameters() if moves else ():
                optimizer.state[p][name] = optimizer.state[p][name].clone()
            return losses

        for _ in range(2):
            optimizer.step(closure)
        results.append(everything(optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_group_whose_places_have_moved_draws_at_the_new_ones(both_kernels):
    """Noise belongs to the place among all uncertain parameters, and the group before this one has shrunk."""
    results = []
    for forgets in (False, True):
        model = network()
        halves = [{"params": list(part.parameters())} for part in (model[0], model[2])]
        optimizer = credo.VOGN(halves, data_size=100, lr=0.01)
        for k in range(5):
            if k == 3:
                model[0].weight.requires_grad_(False)
            if forgets:
                optimizer._lists.clear()
            step(model, optimizer)
        results.append(everything(optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
