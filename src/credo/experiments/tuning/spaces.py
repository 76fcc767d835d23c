"""What is searched for each method: one table, one row a method, so that comparisons have equal budgets.

Every number is a factor on what the method has without a search (a setting of the recipe's row, or else the method's
own default), so the same ranges serve every model, and factor 1 everywhere is the defaults. Three kinds differ:

- a number that the method chooses by itself, relative to each tensor, is multiplied where the optimiser holds it, in
  its parameter groups (`lr_factor` and the like in a recipe's settings);
- a logarithm is shifted instead;
- a weight decay that is zero has no factor: values are searched, and the lowest stands for zero.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

from torch.optim import Optimizer

from credo.errors import InvalidType, InvalidValue
from credo.experiments.build import options_of
from credo.experiments.methods import FACTORS, method_of
from credo.experiments.names import known
from credo.experiments.recipe import Setting, Training

DIGITS: Final = 4  # what is tried has so many significant digits, and is what is printed at the end
Kind: TypeAlias = Literal["factor", "shift", "value"]
# Names; ranges where they are given
Search: TypeAlias = Iterable[str] | Mapping[str, tuple[float, float] | None]


class Suggests(Protocol):
    """The part of an optuna trial that a space uses."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


@dataclass(frozen=True)
class Number:
    """A row of the table names these: an argument and the range of the factor on it."""

    argument: str
    low: float
    high: float
    kind: Kind = "factor"
    largest: float = math.inf  # of the argument itself
    of_model: bool = False  # an option of the model rather than of the optimiser
    without: str = ""  # not searched where the optimiser holds this number, which does the same


LR: Final = Number("lr", 0.1, 10)
NOISE: Final = Number("noise", 0.25, 4)  # κ, the size of the noise relative to the weights
DAMPING: Final = Number("damping", 0.1, 10)
PRIOR: Final = Number("prior_precision", 0.01, 100)
TEMPERING: Final = Number(
    "tempering", 0.03, 30, largest=1, without="noise"
)  # τ, which κ sets where there is one
CURVATURE: Final = Number("initial_curvature", 0.1, 10)  # IVON's noise at the start
LOG_VARIANCE: Final = Number("initial_log_variance", -3, 3, kind="shift")
DECAY: Final = Number("weight_decay", 0.03, 30)
DROPOUT: Final = Number("dropout", 0.25, 4, largest=0.8, of_model=True)
ZERO_DECAY: Final = (1e-6, 1e-2)  # searched where the weight decay is zero

SPACES: Final[dict[str, tuple[Number, ...]]] = {
    "vogn": (LR, NOISE, DAMPING, PRIOR, TEMPERING),
    "ogn": (LR, NOISE, DAMPING, PRIOR, TEMPERING),
    "ivon": (LR, NOISE, CURVATURE, PRIOR, TEMPERING),
    "bbb": (LR, NOISE, LOG_VARIANCE, PRIOR, TEMPERING),
    "kfac": (LR, NOISE, DAMPING, PRIOR, TEMPERING),
    "noisy_kfac": (LR, NOISE, DAMPING, PRIOR, TEMPERING),
    "adam": (LR, DECAY),
    "adamw": (LR, DECAY),
    "sgd": (LR, DECAY),
    "swag": (LR, DECAY),
    "laplace": (LR, DECAY),
    "mc_dropout": (LR, DECAY, DROPOUT),
}


@dataclass(frozen=True)
class Dimension:
    """A number of the table for one problem: what it starts from, and where its value goes."""

    number: Number
    base: float
    key: str  # in settings, or in model_options
    also: tuple[tuple[str, float], ...] = ()  # settings that are multiplied with it, and their bases

    @property
    def label(self) -> str:
        """Its name in tables and plots."""
        words = {"factor": " factor", "shift": " shift", "value": ""}
        return self.number.argument + words[self.number.kind]

    @property
    def neutral(self) -> float:
        """Where it changes nothing."""
        return {"factor": 1.0, "shift": 0.0, "value": self.number.low}[self.number.kind]

    def suggest(self, trial: Suggests) -> float:
        n = self.number
        high = max(min(n.high, n.largest / self.base), self.neutral) if n.kind == "factor" else n.high
        return trial.suggest_float(self.label, n.low, high, log=n.kind != "shift")

    def values(self, suggested: float) -> dict[str, Setting]:
        """The settings it leads to; none where it changes nothing."""
        if suggested == self.neutral:
            return {}
        if self.number.kind == "value":
            return {self.key: rounded(suggested)}
        if self.number.kind == "shift":
            return {self.key: rounded(self.base + suggested)}
        own = {self.key: rounded(min(self.base * suggested, self.number.largest))}
        return {**own, **{name: rounded(base * suggested) for name, base in self.also}}


@dataclass(frozen=True)
class Space:
    """All that is searched for one training."""

    training: Training  # the defaults: where every dimension is neutral
    dimensions: tuple[Dimension, ...]

    @property
    def defaults(self) -> dict[str, float]:
        return {d.label: d.neutral for d in self.dimensions}

    def __call__(self, trial: Suggests) -> Training:
        """The training that a trial proposes. Numbers that two dimensions change are multiplied by both."""
        settings, options = dict(self.training.settings), dict(self.training.model_options)
        for d in self.dimensions:
            table = options if d.number.of_model else settings
            for name, value in d.values(d.suggest(trial)).items():
                table[name] = _product(table, name, value, d)
        return replace(self.training, settings=settings, model_options=options)

    def described(self) -> dict[str, Any]:
        """For the identity of a study: names, ranges and starts."""
        return {d.label: [d.number.low, d.number.high, d.base] for d in self.dimensions}


def _product(table: Mapping[str, Setting], name: str, value: Setting, d: Dimension) -> Setting:
    """What a dimension makes of a number that another one may have changed before."""
    bases = {d.key: d.base, **dict(d.also)}
    before = table.get(name)
    if d.number.kind != "factor" or not isinstance(before, int | float) or before == bases[name]:
        return value
    return rounded(float(value) * before / bases[name])


def space_of(training: Training, optimizer: Optimizer, search: Search | None = None) -> Space:
    """The row of the table for this training; `optimizer` is one that was built with its settings.

    search: names of the arguments to search, all of the row unless given; as a mapping also ranges of the factors.
    """
    row = SPACES.get(training.method, ())
    ranges = _ranges(search, row, training.method)
    found = [_dimension(n, training, optimizer) for n in row if n.argument in ranges]
    dimensions = [_within(d, ranges[d.number.argument]) for d in found if d is not None]
    if not dimensions:
        raise InvalidValue(
            f"the search space of {training.method!r} is empty: "
            + (
                _why_empty(search, row)
                if row
                else "the method has no row in credo.experiments.tuning.spaces.SPACES."
            )
        )
    return Space(training, tuple(dimensions))


def _why_empty(search: Search | None, row: tuple[Number, ...]) -> str:
    names = [n.argument for n in row]
    asked = names if search is None else [name for name in names if name in search]
    why = (
        f"with these settings it has none of {', '.join(asked)}."
        if asked
        else f"search names nothing of {', '.join(names)}."
    )
    return f"{why} Leave search out, or name one that the method has with these settings."


def _ranges(
    search: Search | None, row: tuple[Number, ...], method: str
) -> dict[str, tuple[float, float] | None]:
    if search is None:
        return {n.argument: None for n in row}
    if isinstance(search, str):
        raise InvalidType(f"search must be a list of names or a mapping, got the text {search!r}.")
    asked = dict(search) if isinstance(search, Mapping) else dict.fromkeys(search)
    names = [n.argument for n in row]
    return {known(f"number to search with {method}:", name, names): asked[name] for name in asked}


def _within(d: Dimension, limits: tuple[float, float] | None) -> Dimension:
    if limits is None:
        return d
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise InvalidType(f"search[{d.number.argument!r}] must be a pair (low, high), got {limits!r}.")
    low, high = limits
    lowest = -math.inf if d.number.kind == "shift" else 0.0
    # Of a value the lowest, whatever it is, stands for zero
    inside = d.number.kind == "value" or low <= d.neutral <= high
    if not (lowest < low < high < math.inf and inside):
        raise InvalidValue(
            f"search[{d.number.argument!r}] is a range of the {d.label}: finite, low < high, low above {lowest:g}, the "
            f"default {d.neutral:g} inside; got {low!r} to {high!r}."
        )
    return replace(d, number=replace(d.number, low=float(low), high=float(high)))


def _dimension(number: Number, training: Training, optimizer: Optimizer) -> Dimension | None:
    """None where the training has no such number."""
    if number.of_model:
        return _option_of_model(number, training)
    if number.without and _held(optimizer, number.without) is not None:
        return None
    base = _base(number.argument, training, optimizer)
    if base is None:
        return None
    relative = f"{number.argument}_factor"
    if number.argument not in training.settings and _is_relative(number.argument, training.method, optimizer):
        return (
            Dimension(number, float(training.settings.get(relative, 1.0)), relative)
            if relative in FACTORS
            else None
        )
    if base == 0 and number.kind == "factor":
        low, high = ZERO_DECAY
        zero = replace(number, low=low, high=high, kind="value")
        return Dimension(zero, 0.0, number.argument) if number is DECAY else None
    return Dimension(number, base, number.argument, _together(number, training, optimizer))


def _base(argument: str, training: Training, optimizer: Optimizer) -> float | None:
    """As the recipe has it, or the constructor by default, or what the optimiser chose."""
    default = method_of(training.method).options.get(argument)
    for value in (training.settings.get(argument), default, _held(optimizer, argument)):
        if isinstance(value, int | float):
            return float(value)
    return None


def _is_relative(argument: str, method: str, optimizer: Optimizer) -> bool:
    """Whether the number in the parameter groups is not what the constructor would take."""
    options = method_of(method).options
    if argument not in options:
        return True
    group = optimizer.param_groups[0]
    return options[argument] is None and bool(group.get(f"relative_{argument}", False))


def _together(number: Number, training: Training, optimizer: Optimizer) -> tuple[tuple[str, float], ...]:
    """Where the damping is an absolute number, so is mostly the precision: lr goes with it, and the step stays."""
    lr = _base("lr", training, optimizer)
    absolute = "lr" in training.settings or not _is_relative("lr", training.method, optimizer)
    return (("lr", lr),) if number is DAMPING and lr is not None and absolute else ()


def _held(optimizer: Optimizer, name: str) -> float | None:
    """In the parameter groups, or among the settings of one of credo's optimisers."""
    settings: Mapping[str, Any] = getattr(optimizer, "settings", {})
    value = optimizer.param_groups[0].get(name, settings.get(name))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _option_of_model(number: Number, training: Training) -> Dimension | None:
    """A registered model's option; a model function takes it where the training gives it a value."""
    known_options = options_of(training.model) if isinstance(training.model, str) else {}
    base = training.model_options.get(number.argument, known_options.get(number.argument))
    if not isinstance(base, int | float) or base <= 0:
        return None
    return Dimension(number, float(base), number.argument)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
