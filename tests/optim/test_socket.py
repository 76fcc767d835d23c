"""torch's own conventions: groups, schedulers, hooks, scalers, dtypes, frozen and unused parameters."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import InvalidValue
from tests.optim.replay import snapshot
from tests.optim.trained import METHODS

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
STATE = ("curvature", "momentum", "log_variance")
every_method = pytest.mark.parametrize("method", METHODS)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def losses(model: nn.Module):
    dtype = next(model.parameters()).dtype
    wide = torch.promote_types(dtype, torch.float32)
    return lambda: F.cross_entropy(model(X.to(dtype)).to(wide), Y, reduction="none")


def test_groups_have_their_own_numbers():
    model = network()
    groups = [
        {"params": model[0].named_parameters(), "lr": 0.0, "prior_precision": 7.0},
        {"params": model[2].named_parameters(), "tempering": 0.5, "damping": 0.3, "deterministic": False},
    ]
    named = [
        {**g, "params": [(f"{k}.{n}", p) for n, p in g["params"]]}
        for k, g in zip((0, 2), groups, strict=True)
    ]
    optimizer = credo.VOGN(named, lr=0.1, damping=3e-2, data_size=100, initial_curvature=1.0)
    before = snapshot(model)
    optimizer.step(losses(model))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    s, variance = optimizer.curvature(), optimizer.posterior().variance
    torch.testing.assert_close(variance["0.weight"], 1 / (100 * (s["0.weight"] + 7 / 100 + 3e-2)))
    torch.testing.assert_close(variance["2.weight"], 0.5 / (100 * (s["2.weight"] + 0.5 / 100 + 0.3)))


def test_normalisation_layers_are_deterministic_and_without_a_prior():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.Linear(5, 3))
    numbers = {"lr": 0.15, "damping": 3.0, "initial_curvature": 1.0, "prior_precision": 1e6}
    optimizer = credo.VOGN(model, data_size=100, **numbers)
    mean = snapshot(model)
    with optimizer.sampled():
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, mean[name])}
    assert moved == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert optimizer.posterior().deterministic == {"1.weight", "1.bias", "2.weight", "2.bias"}
    before = model[1].weight.detach().clone()
    optimizer.step(losses(model))
    step = (before - model[1].weight).abs().max()
    assert 0 < step < 1e-2  # moved by its gradient, not pulled to zero by the prior


@every_method
def test_schedulers_and_a_tensor_for_the_learning_rate(method):
    rates = []
    for lr in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        model = network()
        optimizer = method(model, lr=lr, data_size=100)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.step(losses(model))
            schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx([0.0125] * 3)


def test_one_cycle_moves_the_momentum_too():
    model = network()
    optimizer = credo.VOGN(model, data_size=100)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    momenta = set()
    for _ in range(5):
        optimizer.step(losses(model))
        schedule.step()
        momenta.add(optimizer.param_groups[0]["momentum"])
    assert len(momenta) > 2


@every_method
def test_hooks_run_around_the_step(method):
    model, seen = network(), []
    optimizer = method(model, data_size=100)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step(losses(model))
    assert seen == ["before", "after"]


@every_method
def test_add_param_group_leaves_the_others_alone(method):
    model, extra = network(), nn.Linear(3, 3)
    optimizer = method(model, data_size=100)
    optimizer.step(losses(model))
    variance = optimizer.posterior().variance
    optimizer.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()], "lr": 0.5})
    now = optimizer.posterior().variance
    assert all(torch.equal(now[name], v) for name, v in variance.items())
    before = extra.weight.detach().clone()
    optimizer.step(lambda: F.cross_entropy(extra(model(X)), Y, reduction="none"))
    assert not torch.equal(extra.weight, before)
    assert "extra.weight" in optimizer.posterior().mean


@every_method
def test_a_group_that_joins_has_the_names_of_the_module_or_is_refused(method):
    model = network()
    optimizer = method(model, data_size=100)
    with pytest.raises(InvalidValue, match=r"\(name, parameter\) pairs"):
        optimizer.add_param_group({"params": nn.Linear(3, 3).parameters()})
    model.late = nn.Linear(3, 3)
    optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.5})
    assert optimizer.param_groups[-1]["param_names"] == ["late.weight", "late.bias"]
    unnamed = method(network().parameters(), data_size=100)
    with pytest.raises(InvalidValue, match="parameters without names"):
        unnamed.add_param_group({"params": model.late.named_parameters()})
    unnamed.add_param_group({"params": model.late.parameters()})
    assert len(unnamed.param_groups) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@every_method
def test_state_is_float32_or_wider_and_parameters_keep_dtype_and_storage(method, dtype):
    model = network(dtype)
    storages = [p.data_ptr() for p in model.parameters()]
    optimizer = method(model, data_size=100)
    for _ in range(3):
        optimizer.step(losses(model))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for p in model.parameters():
        assert p.dtype == dtype
        assert {v.dtype for name, v in optimizer.state[p].items() if name in STATE} == {wide}
    assert [p.data_ptr() for p in model.parameters()] == storages
    assert optimizer.counters["refused"] == 0


@every_method
def test_mixed_dtypes(method):
    model = network()
    model[2].double()
    optimizer = method(model, data_size=100)
    for _ in range(2):
        optimizer.step(lambda: F.cross_entropy(model[2](model[1](model[0](X)).double()), Y, reduction="none"))
    assert optimizer.posterior().variance["2.weight"].dtype == torch.float64


@every_method
def test_frozen_parameters_stay_and_have_no_noise(method):
    model = network()
    optimizer = method(model, data_size=100)
    optimizer.step(losses(model))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    with optimizer.sampled():
        assert torch.equal(model[0].weight, before)
    optimizer.step(losses(model))
    assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    optimizer.step(losses(model))
    assert not torch.equal(model[0].weight, before)


@every_method
def test_unused_parameters_are_skipped(method):
    model, idle = network(), nn.Linear(2, 2)
    with torch.no_grad():
        idle.weight.mul_(0.1)  # so that τ is below 1
    optimizer = method(nn.ModuleDict({"net": model, "idle": idle}), data_size=100)
    before = idle.weight.detach().clone()
    for _ in range(3):
        optimizer.step(losses(model))
    assert torch.equal(idle.weight, before)
    if optimizer.defaults["noise"] is None:  # numbers that do not follow the tensors
        return
    square = float(idle.weight.detach().square().mean())
    kappa = 0.3 / math.sqrt(3)  # of three matrices
    c = optimizer.defaults.get("damping")  # γ = c·h̄; of what has not been seen h̄ is 1
    share = 1 / (1 + kappa**2) if method is credo.IVON else None
    if method is credo.BayesByBackprop:
        variance = kappa**2 * square
    else:
        variance = kappa**2 * square * (share or (1 + c) / (c + kappa**2 * (1 + c)))
    expected = torch.full((2, 2), variance)
    torch.testing.assert_close(optimizer.posterior().variance["idle.weight"], expected)


@every_method
def test_odd_parameters(method):
    """Non-contiguous, zero-dimensional and empty ones."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4).t())
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return (x @ self.weight) * self.scale

    model = Odd()
    stride = model.weight.stride()
    optimizer = method(model, data_size=100)
    for _ in range(2):
        optimizer.step(losses(model))
    assert model.weight.stride() == stride
    assert optimizer.counters == {**optimizer.counters, "step": 2, "refused": 0}


def test_clipping_between_block_and_step():
    model = network()
    optimizer = credo.OGN(
        model, data_size=100, momentum=0.0, prior_precision=0.0, lr=1.0, damping=1.0, initial_curvature=1e-12
    )
    before = snapshot(model)
    with optimizer.sampled():
        (1000 * F.cross_entropy(model(X), Y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    moved = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters()]).norm()
    assert moved < 1.01e-3


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(
    "method", [credo.OGN, credo.BayesByBackprop, credo.IVON, credo.KFAC, credo.NoisyKFAC]
)
def test_grad_scaler(method, unscale):
    means = []
    for scaled in (False, True):
        model = network(torch.float64)
        optimizer = method(model, data_size=100)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for _ in range(3):
            scale = scaler.get_scale() if scaled and unscale else None
            with optimizer.sampled(scale=scale):
                scaler.scale(F.cross_entropy(model(X.double()), Y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        means.append((snapshot(model), optimizer.posterior().variance))
    torch.testing.assert_close(means[0], means[1], rtol=1e-10, atol=1e-14)


def test_a_scaler_that_unscaled_without_a_declared_scale_is_refused():
    model = network()
    optimizer = credo.OGN(model, data_size=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with optimizer.sampled():
        scaler.scale(F.cross_entropy(model(X), Y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(credo.errors.CallOrderError, match=r"sampled\(scale="):
        scaler.step(optimizer)


def test_the_deterministic_core_works_from_gradients_and_supplied_squares():
    results = []
    for supplied in (False, True):
        model = network(torch.float64)
        optimizer = credo.OGN(model, data_size=100, averaging=0, tempering=1.0)
        for _ in range(3):
            if supplied:
                squares = credo.squared_gradients(
                    model, lambda net=model: F.cross_entropy(net(X.double()), Y)
                )
                optimizer.zero_grad()
                F.cross_entropy(model(X.double()), Y).backward()
                optimizer.supply({p: squares[n] for n, p in model.named_parameters()}, examples=8)
                optimizer.step()
            else:
                optimizer.step(losses(model))
        results.append(snapshot(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@every_method
def test_a_model_that_changes_dtype_or_a_replaced_layer(method):
    model = network()
    optimizer = method(model, data_size=100)
    optimizer.step(losses(model))
    model.double()
    optimizer.step(losses(model))
    assert optimizer.counters["step"] == 2
    model[2] = nn.Linear(5, 3).double()
    with pytest.raises(credo.errors.CallOrderError, match="no longer belongs to the model"):
        optimizer.step(losses(model))
