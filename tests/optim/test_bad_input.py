"""Constructor arguments that cannot be meant: the class of the error, and that its message names the argument."""

import inspect
import math

import pytest
import torch
from torch import nn

import credo
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue, UnsupportedOperation

METHODS = [credo.VOGN, credo.OGN, credo.BayesByBackprop, credo.IVON, credo.KFAC, credo.NoisyKFAC]
NAN, INF = math.nan, math.inf

NUMBERS = {
    "lr": [-1.0, NAN, INF, "0.1", torch.ones(2), [], True],
    "momentum": [-0.1, 1.0, NAN, "x"],
    "ema_rate": [0.0, 1.1, NAN, -1],
    "data_size": [0, -5, NAN, INF, True, 10.5, "60000", None],
    "prior_precision": [-1.0, NAN, INF, "1"],
    "tempering": [0.0, -0.1, 1.1, NAN],
    "damping": [-1e-3, NAN, INF],
    "initial_curvature": [0.0, -1.0, NAN, INF, torch.ones(3), "1"],
    "augmentation": [0.5, NAN, 0, INF],
    "seed": [-1, 2**64, None, 1.5, True],
    "reduction": ["none", None, 1],
    "prior": [1.0, {}, "posterior"],
    "factor_interval": [0, -1, 1.5, NAN, "10", True, None],
    "inverse_interval": [0, -1, 1.5, NAN, "10", True, None],
    "damping_form": ["tikhonov", None, 1],
    "fisher": ["exact", None, True],
    "sharing": ["both", None],
    "betas": [0.9, (0.9,), (1.0, 0.9), (0.9, -0.1), (0.9, NAN), "ab", None],
    "clip_radius": [0.0, -1.0, NAN, "1"],
    "local": [1, None, "yes"],
    "initial_log_variance": [NAN, INF, -100.0, "x"],
    "initial_mean_sd": [-1.0, NAN, "x"],
    "inner": [lambda groups: None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in NUMBERS.items() for v in values])
@pytest.mark.parametrize("method", METHODS)
def test_numbers_out_of_range(method, name, value):
    if name not in inspect.signature(method).parameters:
        return
    with pytest.raises((InvalidValue, InvalidType), match=name) as caught:
        method(nn.Linear(2, 2), **{"data_size": 10, name: value})
    assert isinstance(caught.value, (ValueError, TypeError))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_the_number_of_samples(value):
    with pytest.raises((InvalidValue, InvalidType), match="mc_samples"):
        credo.VOGN(nn.Linear(2, 2), data_size=10, mc_samples=value)


def test_data_size_is_required_and_whole_floats_are_numbers():
    with pytest.raises(TypeError, match="data_size"):
        credo.VOGN(nn.Linear(2, 2))
    assert credo.VOGN(nn.Linear(2, 2), data_size=1e4).settings["data_size"] == 10_000


def test_zero_precision_is_improper():
    with pytest.raises(InvalidValue, match=r"zero precision.*improper"):
        credo.VOGN(nn.Linear(2, 2), data_size=10, prior_precision=0.0, damping=0.0)
    with pytest.raises(InvalidValue, match="zero precision"):
        credo.VOGN(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), data_size=10, damping=0.0)


def used_up():
    generator = nn.Linear(2, 2).parameters()
    list(generator)
    return generator


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def mixed() -> list:
    layer = nn.Linear(2, 2)
    return [("weight", layer.weight), layer.bias]


def twice() -> list:
    layer = nn.Linear(2, 2)
    return [{"params": [layer.weight]}, {"params": [layer.weight]}]


PARAMETERS = {
    "a tensor": (lambda: torch.ones(2, requires_grad=True), InvalidType, "Tensor"),
    "a string": (lambda: "parameters", InvalidType, "str"),
    "a dict": (lambda: {"params": []}, InvalidType, "dict"),
    "a number": (lambda: 3, InvalidType, "int"),
    "a used-up generator": (used_up, InvalidValue, "empty parameter list"),
    "an empty list": (list, InvalidValue, "empty parameter list"),
    "an empty group": (lambda: [{"params": []}], InvalidValue, "empty parameter list"),
    "nothing to train": (frozen, InvalidValue, "Linear has no trainable"),
    "complex numbers": (
        lambda: [nn.Parameter(torch.ones(2, dtype=torch.cfloat))],
        InvalidType,
        r"params\[0\].*complex",
    ),
    "integers": (
        lambda: [("w", nn.Parameter(torch.ones(2).long(), requires_grad=False))],
        InvalidType,
        "w is of dtype",
    ),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), InvalidType, "weight is on the meta device"),
    "sparse": (lambda: [torch.ones(2, 2).to_sparse().requires_grad_()], InvalidType, "sparse"),
    "not tensors": (lambda: [3], InvalidType, r"params\[0\]"),
    "named and unnamed": (mixed, ValueError, "with/without names"),
    "in two groups": (twice, ValueError, "more than one parameter group"),
    "a typo": (
        lambda: [{"params": [nn.Parameter(torch.ones(2))], "prior_precison": 1.0}],
        InvalidValue,
        "'prior_precision'",
    ),
    "weight decay": (
        lambda: [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 1.0}],
        InvalidValue,
        "weight_decay",
    ),
    "a bad value in a group": (
        lambda: [{"params": [nn.Parameter(torch.ones(2))], "tempering": 2.0}],
        InvalidValue,
        "tempering",
    ),
    "DataParallel": (
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        UnsupportedOperation,
        r"DataParallel.*model\.module",
    ),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2)), UnsupportedOperation, "compiled"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), UnsupportedOperation, "scripted"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), CallOrderError, "Run one forward first"),
    "sparse embeddings": (
        lambda: nn.ModuleDict(
            {"a": nn.Embedding(3, 2, sparse=True), "b": nn.EmbeddingBag(3, 2, sparse=True)}
        ),
        UnsupportedOperation,
        r"a \(Embedding\), b \(EmbeddingBag\)",
    ),
}


@pytest.mark.parametrize(("parameters", "kind", "message"), PARAMETERS.values(), ids=PARAMETERS.keys())
@pytest.mark.parametrize("method", METHODS)
def test_parameters(method, parameters, kind, message):
    with pytest.raises(kind, match=message):
        method(parameters(), data_size=10)


def test_the_same_parameter_twice_in_a_group_warns_as_torch_does():
    weight = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"):
        credo.VOGN([weight, weight], data_size=10)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="weightdecay"):
        credo.VOGN(nn.Linear(2, 2), data_size=10, weightdecay=1.0)


@pytest.mark.parametrize(
    ("start", "end", "steps"), [(0.0, 1.0, 5), (0.1, 2.0, 5), (0.1, 1.0, 0), (0.1, 1.0, None), ("a", 1.0, 5)]
)
def test_schedules_that_leave_the_range(start, end, steps):
    optimizer = credo.VOGN(nn.Linear(2, 2), data_size=10)
    with pytest.raises((InvalidValue, InvalidType)):
        credo.TemperingSchedule(optimizer, start, end, steps)
    assert optimizer.param_groups[0]["tempering"] == optimizer.defaults["tempering"]


def test_a_function_that_leaves_the_range_is_stopped_there():
    optimizer = credo.VOGN(nn.Linear(2, 2), data_size=10)
    schedule = credo.TemperingSchedule(optimizer, function=lambda t: 0.5 + 0.4 * t)
    schedule.step()
    with pytest.raises(InvalidValue, match="tempering"):
        schedule.step()
    assert optimizer.param_groups[0]["tempering"] == pytest.approx(0.9)


def test_a_schedule_stays_at_its_end_and_resumes():
    optimizer = credo.VOGN(nn.Linear(2, 2), data_size=10)
    schedule = credo.TemperingSchedule(optimizer, 0.2, 1.0, 4)
    values = []
    for _ in range(6):
        values.append(optimizer.param_groups[0]["tempering"])
        schedule.step()
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    other = credo.TemperingSchedule(credo.VOGN(nn.Linear(2, 2), data_size=10), 0.2, 1.0, 4)
    for _ in range(2):
        other.step()
    fresh = credo.TemperingSchedule(optimizer, 0.2, 1.0, 4)
    fresh.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["tempering"] == pytest.approx(0.6)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam([torch.ones(1, requires_grad=True)]), None])
def test_a_schedule_wants_an_optimiser_with_a_tempering(optimizer):
    with pytest.raises(InvalidType, match="tempering"):
        credo.TemperingSchedule(optimizer, 0.1, 1.0, 5)


def test_a_prior_that_does_not_fit():
    model = nn.Linear(2, 2)
    posterior = credo.OGN(model, data_size=10).posterior()
    other = credo.OGN(nn.Linear(3, 2), data_size=10).posterior()
    with pytest.raises(InvalidValue, match=r"'weight' has shape \(2, 3\) there"):
        credo.VOGN(model, data_size=10, prior=other)
    with pytest.raises(InvalidValue, match="nothing is called 'parameter_0'"):
        credo.VOGN(model.parameters(), data_size=10, prior=posterior)


def test_everything_is_a_credo_error():
    for kind in (InvalidValue, InvalidType, CallOrderError, UnsupportedOperation):
        assert issubclass(kind, CredoError)
