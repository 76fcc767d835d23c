"""What is left of a fresh start, against VOGN itself on data that say nothing."""

import math

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import Task, Variational, annealed, learn, remaining_distance, share_left
from credo.errors import InvalidType, InvalidValue
from credo.experiments import Training
from credo.experiments.recipes import RECIPES

STREAMS = [recipe for recipe in RECIPES.values() if recipe.is_stream]

PRIOR = credo.DiagonalPosterior(
    {"weight": torch.tensor([[0.3, -0.2, 0.1]]).double()},
    {
        "weight": torch.tensor([[1.0, 0.02, 1e-4]]).double()
    },  # duller than where the precision starts, and sharper
)


def silence(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0 * outputs.sum(1)


@pytest.mark.parametrize("annealing", [None, annealed(0.1, hold=0.5)], ids=["constant", "annealed"])
def test_what_vogn_leaves(annealing):
    rates = {"lr": 0.2, "ema_rate": 0.1, "initial_precision": 100.0}
    x = torch.ones(6, 3, dtype=torch.float64)
    task = Task("nothing", x, x[:, :1], x, x[:, :1])
    starts = []

    def make(model: nn.Module, n: int, prior: credo.Posterior | None, seed: int) -> credo.VOGN:
        return credo.VOGN(model, data_size=n, prior=prior, seed=seed, momentum=0.0, damping=0.0, **rates)

    def watch(course) -> None:
        if course.steps == 1:
            first = rates["lr"] / (1 + torch.clamp(100 * PRIOR.variance["weight"] - 1, min=0) * 0.9)
            starts.append((model.weight.detach() - PRIOR.mean["weight"]) / (1 - first))

    model = nn.Linear(3, 1, bias=False).double()
    learner = Variational(
        model, make, loss=silence, posterior=PRIOR, kind="regression", annealing=annealing or annealed()
    )
    learn(learner, [task], epochs=15, batch_size=2, score=lambda *_: 0.0, watch=watch)
    left = (learner.posterior.mean["weight"] - PRIOR.mean["weight"]) / starts[0]
    expected = [
        remaining_distance(45, prior_precision=float(1 / v), annealing=annealing, **rates)
        for v in PRIOR.variance["weight"][0]
    ]
    assert left[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_closed_forms():
    assert remaining_distance(7, lr=0.1, ema_rate=0.5, initial_precision=1.0) == pytest.approx(0.9**7)
    assert share_left(1, lr=0.1, ema_rate=1.0, initial_precision=1e6) == pytest.approx(0.9)
    # about exp(−α(T − log(P/P₀)/β₂)): time counts from when the initial precision has faded
    left = share_left(23_500, lr=1e-3, ema_rate=1e-3, initial_precision=1e6)
    assert math.log(left) == pytest.approx(-1e-3 * (23_500 - math.log(1e6) / 1e-3), rel=0.01)


def steps_of(training: Training) -> int:
    smallest = 60_000 if training.tasks.kind == "permuted" else 11_263  # fours and fives
    return training.epochs * math.ceil(smallest / training.batch_size)


@pytest.mark.parametrize("size", ["paper", "cpu"])
@pytest.mark.parametrize("recipe", STREAMS, ids=lambda recipe: recipe.name)
def test_the_recipes_leave_a_fresh_start_the_time_to_return(recipe, size):
    training = next(row.training(size) for row in recipe.rows if row.name == "vogn")
    rates = {name: training.settings[name] for name in ("lr", "ema_rate", "initial_precision")}
    annealing = annealed(training.tasks.last_lr, training.tasks.hold)
    assert share_left(steps_of(training), annealing=annealing, **rates) < 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("lr", 0.0),
        ("ema_rate", 1.5),
        ("initial_precision", math.nan),
        ("prior_precision", -1.0),
        ("lr", "1"),
    ],
)
def test_bad_numbers(name, value):
    given = {"steps": 3, "lr": 0.1, "ema_rate": 0.1, "initial_precision": 1.0} | {name: value}
    with pytest.raises((InvalidValue, InvalidType), match=name):
        share_left(given.pop("steps"), **given)


def test_the_first_name_stays() -> None:
    assert share_left is remaining_distance
