"""What is searched: factor 1 everywhere is the defaults, and every factor arrives at the number it is for."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch.optim import Optimizer

from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import METHODS, method_of
from credo.experiments.recipe import Setting, Training
from credo.experiments.tasks import Classification
from credo.experiments.tuning.spaces import SPACES, Search, Space, rounded, space_of
from tests.experiments.small import small, small_with_dropout, three_blobs

ABSOLUTE: dict[str, Setting] = {"lr": 0.02, "damping": 0.4, "prior_precision": 2.0}


class Fixed:
    """A trial whose suggestions are given; the others are in the middle, as `defaults` has them."""

    def __init__(self, values: Mapping[str, float], defaults: Mapping[str, float]) -> None:
        self._values = {**defaults, **values}
        self.ranges: dict[str, tuple[float, float]] = {}

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        self.ranges[name] = (low, high)
        assert low <= self._values[name] <= high
        return self._values[name]


def training(method: str, settings: Mapping[str, Setting] = {}) -> Training:
    if method == "mc_dropout":
        return Training(method, small_with_dropout, three_blobs, settings, {"dropout": 0.3})
    return Training(method, small, three_blobs, settings)


def optimizer(found: Training) -> Optimizer:
    model = small_with_dropout() if found.method == "mc_dropout" else small()
    learner = method_of(found.method).build(
        model, Classification(), data_size=60, seed=0, settings=found.settings
    )
    return learner.optimizer


def space(method: str, settings: Mapping[str, Setting] = {}, search: Search | None = None) -> Space:
    base = training(method, settings)
    return space_of(base, optimizer(base), search)


def proposed(found: Space, **values: float) -> Training:
    labels = {d.number.argument: d.label for d in found.dimensions}
    return found(Fixed({labels[name]: value for name, value in values.items()}, found.defaults))


def test_every_method_has_a_row() -> None:
    assert SPACES.keys() == METHODS.keys()


@pytest.mark.parametrize("method", SPACES)
def test_the_defaults_change_nothing(method: str) -> None:
    found = space(method)
    assert found(Fixed({}, found.defaults)) == training(method)
    assert len(found.dimensions) >= 2


@pytest.mark.parametrize("method", [name for name in SPACES if name != "mc_dropout"])
@pytest.mark.parametrize("ends", [0, 1])
def test_both_ends_of_every_range_make_an_optimiser(method: str, ends: int) -> None:
    found = space(method)
    seen = Fixed({}, found.defaults)
    found(seen)
    optimizer(found(Fixed({name: pair[ends] for name, pair in seen.ranges.items()}, found.defaults)))


# method, its settings, the factor, and the settings that are to come of it
CASES = [
    ("adam", {}, {"lr": 3.0}, {"lr": 3e-3}),
    ("adam", {}, {"weight_decay": 1e-4}, {"weight_decay": 1e-4}),
    ("adam", {"weight_decay": 2e-3}, {"weight_decay": 10.0}, {"weight_decay": 2e-2}),
    ("adamw", {}, {"weight_decay": 3.0}, {"weight_decay": 3e-2}),
    ("sgd", {"lr": 0.3}, {"lr": 0.1}, {"lr": 0.03}),
    ("vogn", {}, {"lr": 2.0, "noise": 0.5}, {"lr_factor": 2.0, "noise_factor": 0.5}),
    ("vogn", {"lr_factor": 3.0}, {"lr": 2.0}, {"lr_factor": 6.0}),
    ("vogn", ABSOLUTE, {"lr": 2.0}, {**ABSOLUTE, "lr": 0.04}),
    ("vogn", ABSOLUTE, {"damping": 2.0}, {**ABSOLUTE, "lr": 0.04, "damping": 0.8}),
    ("vogn", ABSOLUTE, {"lr": 0.5, "damping": 3.0}, {**ABSOLUTE, "lr": 0.03, "damping": 1.2}),
    ("vogn", ABSOLUTE, {"prior_precision": 0.25}, {**ABSOLUTE, "prior_precision": 0.5}),
    ("vogn", {**ABSOLUTE, "tempering": 0.5}, {"tempering": 1.5}, {**ABSOLUTE, "tempering": 0.75}),
    ("ogn", {}, {"damping": 4.0}, {"damping_factor": 4.0}),
    ("ivon", {"initial_curvature": 0.1}, {"initial_curvature": 5.0}, {"initial_curvature": 0.5}),
    ("bbb", {}, {"initial_log_variance": -1.5}, {"initial_log_variance": -7.5}),
    ("kfac", {"damping": 0.2, "lr": 0.1}, {"damping": 0.5}, {"damping": 0.1, "lr": 0.05}),
]


@pytest.mark.parametrize(("method", "settings", "values", "expected"), CASES)
def test_a_factor_is_on_the_number_it_is_for(
    method: str, settings: dict[str, Setting], values: dict[str, float], expected: dict[str, Setting]
) -> None:
    found = space(method, settings)
    if all(name in {d.number.argument for d in found.dimensions} for name in values):
        assert proposed(found, **values).settings == expected
    else:  # what a method chooses by itself may become a number to give, and the other way round
        assert method != "vogn"


def test_dropout_is_an_option_of_the_model() -> None:
    changed = proposed(space("mc_dropout"), dropout=0.5)
    assert changed.model_options == {"dropout": 0.15}
    assert changed.settings == {}


def test_a_relative_number_is_multiplied_in_every_group_and_for_schedules() -> None:
    base = training("vogn")
    changed = proposed(space_of(base, optimizer(base)), lr=2.0, noise=0.5)
    before, after = optimizer(base), optimizer(changed)
    assert len(after.param_groups) == 2  # the norm has its own
    for one, other in zip(before.param_groups, after.param_groups, strict=True):
        assert other["lr"] == 2 * one["lr"]
        assert other["noise"] == 0.5 * one["noise"]
        assert other["damping"] == one["damping"]
    assert after.defaults["lr"] == 2 * before.defaults["lr"]


def test_a_factor_on_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"noise_factor=2 .* chosen none"):
        optimizer(training("vogn", {**ABSOLUTE, "noise_factor": 2.0}))
    with pytest.raises(InvalidValue, match=r"lr_factor must lie in"):
        optimizer(training("adam", {"lr_factor": -1.0}))


def test_noise_and_tempering_are_not_both_searched() -> None:
    relative = {d.number.argument for d in space("vogn").dimensions}
    absolute = {d.number.argument for d in space("vogn", ABSOLUTE).dimensions}
    assert relative >= {"lr", "noise"}
    assert "tempering" not in relative
    assert absolute == {"lr", "damping", "prior_precision", "tempering"}


def test_a_tempering_of_one_is_only_lowered() -> None:
    found = space("vogn", {**ABSOLUTE, "tempering": 1.0})
    seen = Fixed({}, found.defaults)
    found(seen)
    assert seen.ranges["tempering factor"] == (0.03, 1.0)


def test_search_chooses_numbers_and_ranges() -> None:
    assert [d.label for d in space("adam", search=["lr"]).dimensions] == ["lr factor"]
    found = space("adam", search={"lr": (0.5, 2.0), "weight_decay": None})
    seen = Fixed({}, found.defaults)
    found(seen)
    assert seen.ranges == {"lr factor": (0.5, 2.0), "weight_decay": (1e-6, 1e-2)}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ([], "search space of 'vogn' is empty: search names nothing of lr, noise"),
        (["tempering"], "search space of 'vogn' is empty: with these settings"),
        (["learning_rate", "lr"], "unknown number to search with vogn: 'learning_rate'"),
        ({"lr": (2.0, 4.0)}, "default 1 inside; got 2.0 to 4.0"),
        ({"lr": (0.0, 4.0)}, "low above 0"),
        ({"lr": (1.0, 1.0)}, "low < high"),
        ({"lr": (0.5, math.inf)}, "finite"),
    ],
)
def test_a_search_that_cannot_be_is_refused(search: Search, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        space("vogn", search=search)


@pytest.mark.parametrize("search", ["lr", {"lr": 2.0}, {"lr": (1.0,)}])
def test_a_search_of_a_wrong_type_is_refused(search: Search) -> None:
    with pytest.raises(InvalidType, match="search"):
        space("vogn", search=search)


def test_a_method_without_a_row_has_an_empty_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SPACES, "adam")
    with pytest.raises(InvalidValue, match=r"search space of 'adam' is empty: .*no row"):
        space("adam")


@pytest.mark.parametrize(
    ("value", "expected"), [(0.123456, 0.1235), (1.5e-7, 1.5e-7), (98765.4, 98770.0), (1, 1)]
)
def test_what_is_tried_is_what_is_printed(value: float, expected: float) -> None:
    assert rounded(value) == expected


def test_the_global_generator_is_not_used() -> None:
    before = torch.get_rng_state()
    base = training("vogn")
    built = optimizer(base)
    state = torch.get_rng_state()
    space_of(base, built)
    assert torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(before)
