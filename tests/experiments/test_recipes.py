"""Recipes against the paper's tables, transcribed here a second time, and against the code that runs them."""

import dataclasses
from collections.abc import Iterator

import pytest

from credo import data
from credo.data.augmentation import PadCropFlip, RandomCropFlip
from credo.errors import CredoError, InvalidValue
from credo.experiments.figures import CAPTIONS
from credo.experiments.names import plain_name
from credo.experiments.overrides import check_training
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipes import RECIPES, recipe
from credo.models import ResNet18

# Table 3, as printed: train acc, sd, train NLL, sd, acc, sd, NLL, sd, ECE, sd, AUROC, sd, epochs, s/epoch; - is none.
TABLE_3 = {
    "table1-lenet5": """
        adam        71.98 0.117  0.733 0.021  67.67 0.513  0.937 0.012  0.021 0.002  0.794 0.001   210 6.96
        bbb         66.84 0.003  0.957 0.006  64.61 0.331  1.018 0.006  0.045 0.005  0.784 0.003   800 11.43
        mc-dropout  68.41 0.581  0.870 0.101  67.65 1.317  0.99  0.026  0.087 0.009  0.797 0.006   210 6.95
        vogn        70.79 0.763  0.880 0.02   67.32 1.310  0.938 0.024  0.046 0.002  0.8   0.002   210 18.33""",
    "table1-alexnet": """
        adam        100.0 0      0.001 0      67.94 0.537  2.83  0.02   0.262 0.005  0.793 0.001   161 3.12
        mc-dropout  97.56 0.278  0.058 0.014  72.20 0.177  1.077 0.012  0.140 0.004  0.818 0.002   160 3.25
        vogn        79.07 0.248  0.696 0.020  69.03 0.419  0.931 0.017  0.024 0.010  0.796 0       160 9.98""",
    "table1-alexnet-augmented": """
        adam        97.92 0.140  0.057 0.006  73.59 0.296  1.480 0.015  x     x      x     x       161 3.08
        mc-dropout  80.65 0.615  0.47  0.052  77.04 0.343  0.667 0.012  0.114 0.002  0.828 0.002   160 3.20
        vogn        81.15 0.259  0.511 0.039  75.48 0.478  0.703 0.006  0.016 0.001  0.832 0.002   160 10.02""",
    "table1-resnet18": """
        adam        97.74 0.140  0.059 0.012  86.00 0.257  0.55  0.01   0.082 0.002  0.877 0.001   160 11.97
        mc-dropout  88.23 0.243  0.317 0.045  82.85 0.208  0.51  0      0.166 0.025  0.768 0.004   161 12.51
        vogn        91.62 0.07   0.263 0.051  84.27 0.195  0.477 0.006  0.040 0.002  0.876 0.002   161 53.14""",
    "table1-imagenet": """
        sgd         82.63 0.058  0.675 0.017  67.79 0.017  1.38  0      0.067 -      0.856 -       90  44.13
        adam        80.96 0.098  0.723 0.015  66.39 0.168  1.44  0.01   0.064 -      0.855 -       90  44.40
        mc-dropout  72.96 -      1.12  -      65.64 -      1.43  -      0.012 -      0.856 -       90  45.86
        ogn         85.33 0.057  0.526 0.005  65.76 0.115  1.60  0      0.128 0.004  0.8543 0.001  90  63.13
        vogn        73.87 0.061  1.02  0.01   67.38 0.263  1.37  0.01   0.0293 0.001 0.8543 0      90  76.04
        kfac        83.73 0.058  0.571 0.016  66.58 0.176  1.493 0.006  0.158 0.005  0.842 0.005   60  133.69
        noisy-kfac  72.28 -      1.075 -      66.44 -      1.44  -      0.080 -      0.852 -       60  179.27""",
}
METRICS = ("train_accuracy", "train_nll", "accuracy", "nll", "ece", "auroc")  # x above: a slip, no target

# Table 4: α_init, α, decay epochs, β₁, β₂ (both weigh the new value for Adam), weight decay, L2.
TABLE_4 = """
    table1-lenet5            adam        -       1e-3   -         -    -      1e-2  -
    table1-lenet5            mc-dropout  -       1e-3   -         0.9  -      -     1e-4
    table1-lenet5            vogn        -       1e-2   -         0.9  0.999  -     -
    table1-alexnet           adam        -       1e-3   80,120    -    -      1e-4  -
    table1-alexnet           mc-dropout  -       1e-1   80,120    0.9  -      -     1e-4
    table1-alexnet           vogn        -       1e-4   80,120    0.9  0.999  -     -
    table1-alexnet-augmented adam        -       1e-3   80,120    -    -      1e-4  -
    table1-alexnet-augmented mc-dropout  -       1e-1   80,120    0.9  -      -     1e-4
    table1-alexnet-augmented vogn        -       1e-4   80,120    0.9  0.999  -     -
    table1-resnet18          adam        -       1e-3   80,120    -    -      5e-4  -
    table1-resnet18          mc-dropout  -       1e-1   80,120    0.9  -      -     1e-4
    table1-resnet18          vogn        -       1e-4   80,120    0.9  0.999  -     -
    table1-imagenet          sgd         1.25e-2 1.6    30,60,80  0.9  -      -     1e-4
    table1-imagenet          adam        1.25e-5 1.6e-3 30,60,80  -    -      1e-4  -
    table1-imagenet          mc-dropout  1.25e-2 1.6    30,60,80  0.9  -      -     1e-4
    table1-imagenet          ogn         1.25e-5 1.6e-3 30,60,80  0.9  0.9    -     -
    table1-imagenet          vogn        1.25e-5 1.6e-3 30,60,80  0.9  0.999  -     -
    table1-imagenet          kfac        1.25e-5 1.6e-3 15,30,45  0.9  0.9    -     -
    table1-imagenet          noisy-kfac  1.25e-5 1.6e-3 15,30,45  0.9  0.9    -     -"""

# Table 5: M, GPUs, K, τ from, τ to, ρ, N, δ, γ; and δ̃ at the end, τδ/(ρN), corrected in two places.
TABLE_5 = {
    ("table1-lenet5", "vogn"): (128, 4, 6, 0.1, 1, 1, 50_000, 100, 1e-3, 2e-3),
    ("table1-alexnet", "vogn"): (128, 8, 3, 0.05, 1, 1, 50_000, 0.5, 1e-3, 1e-5),
    ("table1-alexnet-augmented", "vogn"): (128, 8, 3, 0.5, 1, 10, 50_000, 0.5, 1e-3, 1e-6),  # printed: 1e-5
    ("table1-resnet18", "vogn"): (256, 8, 5, None, 1, 10, 50_000, 50, 1e-3, 1e-4),  # printed: 1e-3
    ("table1-imagenet", "vogn"): (4096, 128, 1, None, 1, 5, 1_281_167, 133.3, 1e-4, 2e-5),
    ("table1-imagenet", "noisy-kfac"): (4096, None, None, None, 1, 5, 1_281_167, 133.3, 1e-4, 2e-5),
}


def row_of(recipe_name: str, row_name: str) -> Row:
    return next(row for row in RECIPES[recipe_name].rows if row.name == row_name)


def paper_of(recipe_name: str, row_name: str) -> Training:
    found = row_of(recipe_name, row_name).paper
    assert found is not None
    return found


def lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize("name", TABLE_3)
def test_published_numbers_are_those_of_the_paper(name: str) -> None:
    printed = lines(TABLE_3[name])
    released = {row.name for row in RECIPES[name].rows if row.name.endswith(("-released", "-defaults"))}
    assert {line[0] for line in printed} | released == {row.name for row in RECIPES[name].rows}
    for row, *numbers, epochs, seconds in printed:
        published = dict(row_of(name, row).published)
        assert published.pop("epochs") == (int(epochs), None)
        assert published.pop("seconds_per_epoch") == (float(seconds), None)
        for metric, mean, sd in zip(METRICS, numbers[::2], numbers[1::2], strict=True):
            if mean == "x":
                assert metric not in published
                continue
            unit = 100 if metric.endswith("accuracy") else 1
            found = published.pop(metric)
            assert found[0] == pytest.approx(float(mean) / unit, abs=1e-9)
            assert (found[1] is None) if sd == "-" else found[1] == pytest.approx(float(sd) / unit, abs=1e-9)
        assert published == {}


@pytest.mark.parametrize("line", lines(TABLE_4), ids=lambda line: "-".join(line[:2]))
def test_settings_are_those_of_the_paper(line: list[str]) -> None:
    name, row, start, lr, milestones, momentum, ema_rate, weight_decay, l2 = line
    training, settings = paper_of(name, row), paper_of(name, row).settings
    assert settings["lr"] == float(lr)
    assert (training.warmup_epochs, training.warmup_from) == ((0, 0) if start == "-" else (5, float(start)))
    assert training.milestones == (() if milestones == "-" else tuple(map(int, milestones.split(","))))
    assert training.decay == 0.1
    for key, value in (("momentum", momentum), ("ema_rate", ema_rate)):
        assert settings.get(key) == (None if value == "-" else float(value))
    decay = l2 if weight_decay == "-" else weight_decay
    assert settings.get("weight_decay") == (None if decay == "-" else float(decay))
    assert training.epochs == row_of(name, row).published["epochs"][0]


def test_bayes_by_backprop_has_the_settings_of_the_paper() -> None:
    """10 samples for linear layers and 1 for convolutions in training, 100 (and 10) at test time."""
    training = paper_of("table1-lenet5", "bbb")
    samples = {"mc_samples": 10, "convolution_samples": 1, "vectorized": True}
    start = {"initial_log_variance": -6.0, "initial_mean_sd": 0.1}
    assert training.settings == {"lr": 1e-3, "prior_precision": 1.0, **samples, **start}
    assert (training.epochs, training.samples) == (800, 100)


@pytest.mark.parametrize("key", TABLE_5, ids="-".join)
def test_variational_settings_are_those_of_the_paper(key: tuple[str, str]) -> None:
    batch, gpus, samples, start, end, rho, size, delta, gamma, weight_decay = TABLE_5[key]
    training = paper_of(*key)
    settings = training.settings
    assert training.batch_size == batch
    assert (settings.get("mc_slices"), settings.get("mc_samples")) == (gpus, samples)
    assert (training.tempering_from, settings["tempering"]) == (start, end)
    assert (training.tempering_epochs > 0) == (start is not None)
    assert (settings["prior_precision"], settings["damping"]) == (delta, gamma)
    assert training.augment == (rho > 1)
    assert end * delta / (rho * size) == pytest.approx(weight_decay, rel=0.05)


def test_the_augmentations_know_the_rho_of_the_table() -> None:
    """A recipe says only that it augments; the data set's own augmentation brings ρ."""
    assert PadCropFlip().rho == TABLE_5["table1-resnet18", "vogn"][5]
    assert RandomCropFlip(224).rho == TABLE_5["table1-imagenet", "vogn"][5]


@pytest.mark.parametrize(("row", "l2"), [("ogn", 1e-5), ("kfac", 1e-4)])
def test_the_l2_coefficient_of_a_method_with_a_prior_is_its_precision(row: str, l2: float) -> None:
    delta = paper_of("table1-imagenet", row).settings["prior_precision"]
    assert float(delta) / (5 * 1_281_167) == pytest.approx(l2)


@pytest.mark.parametrize(
    ("name", "row", "accuracy", "nll"),
    [
        ("figure12-dropout-lenet5", "dropout-0.01", 0.103, 0.34),
        ("figure12-dropout-lenet5", "dropout-0.1", 0.014, 0.04),
        ("figure12-dropout-lenet5", "dropout-0.2", -0.0771, -0.02),
        ("figure8-prior-variance", "prior-variance-7.5e-4", 0.0229, 0.12),
        ("figure8-prior-variance", "prior-variance-7.5e-3", 0.0638, 0.34),
    ],
)
def test_published_gaps(name: str, row: str, accuracy: float, nll: float) -> None:
    published = row_of(name, row).published
    assert published["accuracy_gap"] == (pytest.approx(accuracy), None)
    assert published["nll_gap"] == (nll, None)


def test_released_settings_differ_only_where_the_code_differs_from_the_paper() -> None:
    changed = {"table1-lenet5": {"lr": 1e-4}, "table1-alexnet": {}, "table1-imagenet": {"ema_rate": 0.9}}
    for name, settings in changed.items():
        assert paper_of(name, "vogn-released").settings == {**paper_of(name, "vogn").settings, **settings}
    assert paper_of("table1-alexnet", "vogn-released").batch_size == 256


def test_rows_of_a_sweep_differ_in_what_they_are_named_after() -> None:
    for row in RECIPES["figure8-prior-variance"].rows:
        for training in (row.paper, row.cpu):
            assert training is not None
            variance = 1 / float(training.settings["prior_precision"])
            assert variance == pytest.approx(float(row.name.removeprefix("prior-variance-")), rel=2e-3)
    table = paper_of("table1-imagenet", "vogn")
    assert paper_of("figure8-prior-variance", "prior-variance-7.5e-3") == table
    assert paper_of("figure11-training-samples", "train-1-test-10") == table
    assert paper_of("figure11-test-samples", "train-1-test-100") == dataclasses.replace(table, samples=100)
    assert paper_of("figure10-rho", "rho-10-prior-variance-7.5e-3").settings["augmentation"] == 10
    assert paper_of("figure3-momentum-batchnorm", "momentum-batchnorm") == paper_of("table1-resnet18", "vogn")
    assert paper_of("figure17-ood-lenet5", "vogn").ood == ("svhn", "lsun_crop", "lsun_resize")


# What holds for every row


def all_trainings() -> Iterator[tuple[str, Training]]:
    for found in RECIPES.values():
        for row in found.rows:
            for size in ("paper", "cpu"):
                training = getattr(row, size)
                if training is not None:
                    yield f"{found.name}-{row.name}-{size}", training


@pytest.mark.parametrize(
    ("name", "training"), list(all_trainings()), ids=[name for name, _ in all_trainings()]
)
def test_every_training_can_be_run(name: str, training: Training) -> None:
    """Names of methods, models, data, settings and options exist, and types are right."""
    check_training(training)
    assert {training.data, *training.ood} <= set(data.names())
    assert all(epoch < training.epochs for epoch in training.milestones)


@pytest.mark.parametrize("found", RECIPES.values(), ids=lambda found: found.name)
def test_every_recipe_is_whole(found: Recipe) -> None:
    assert RECIPES[found.name] is found
    assert found.title
    assert found.source
    assert set(found.figures) <= set(CAPTIONS)
    names = [plain_name("row", row.name) for row in found.rows]
    assert len(set(names)) == len(names)
    assert all(row.cpu is not None or row.name.endswith("-released") for row in found.rows)
    if any(row.paper is not None for row in found.rows):
        assert "CPU size" in found.note  # what it changes is said


def test_every_table_and_figure_with_training_is_there() -> None:
    sources = " ".join(found.source for found in RECIPES.values())
    for figure in (
        "Table 1",
        "Figure 1:",
        "3a",
        "4",
        "5",
        "7a",
        "7b",
        "7c",
        "7d",
        "7e",
        *map(str, range(8, 18)),
    ):
        assert figure in sources


def test_lookup_suggests_and_refuses() -> None:
    assert recipe("table1-lenet5") is RECIPES["table1-lenet5"]
    with pytest.raises(InvalidValue, match="Did you mean 'table1-lenet5'"):
        recipe("table1-lenet")
    for name in ("../table1-lenet5", "/etc/passwd", "a/b", "..", ""):
        with pytest.raises(CredoError, match="path parts"):
            recipe(name)


def test_a_resnet_without_batch_norm_has_none() -> None:
    model = ResNet18(width=4, batch_norm=False)
    assert not any("BatchNorm" in type(module).__name__ for module in model.modules())
    assert model.conv1.bias is not None
    assert ResNet18(width=4).conv1.bias is None
