"""Settings from text: nothing is guessed, and what is wrong is found with its place (row 63)."""

from dataclasses import replace
from pathlib import Path

import pytest

from credo.errors import InvalidType, InvalidValue
from credo.experiments.overrides import check_training, parse_assignments, with_overrides
from credo.experiments.recipe import Training
from credo.experiments.recipe_file import load_recipe

GOOD = """\
name = "mine"
title = "Mine"

[training]
model = "mlp"
data = "digits"
epochs = 3
milestones = [1, 2]
model_options = { width = 20 }

[[rows]]
name = "adam"
method = "adam"
settings = { lr = 1e-3 }

[[rows]]
name = "vogn"
method = "vogn"
epochs = 5
tempering_from = 0.1
tempering_epochs = 2
[rows.settings]
lr = 2e-3
mc_samples = 2
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_a_recipe_file(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, GOOD))
    adam, vogn = recipe.rows
    assert (recipe.name, recipe.title, adam.name, vogn.name) == ("mine", "Mine", "adam", "vogn")
    shared = {"model_options": {"width": 20}, "milestones": (1, 2)}
    assert adam.cpu == Training("adam", "mlp", "digits", {"lr": 1e-3}, epochs=3, **shared)
    settings = {"lr": 2e-3, "mc_samples": 2}
    assert vogn.cpu == Training(
        "vogn", "mlp", "digits", settings, epochs=5, tempering_from=0.1, tempering_epochs=2.0, **shared
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("epochs = 3", "epoch = 3", 7, "unknown key 'epoch'. Did you mean 'epochs'"),
        ("title =", "titel =", 2, "Did you mean 'title'"),
        ("settings = { lr = 1e-3 }", "setings = { lr = 1e-3 }", 14, "Did you mean 'settings'"),
        ("mc_samples = 2", "mc_sample = 2", 24, "Did you mean 'mc_samples'"),
        ("width = 20", "widht = 20", 9, "Did you mean 'width'"),
        ("epochs = 3", "epochs = 3\nepochs = 4", 8, "overwrite"),
        ("lr = 1e-3", 'lr = "0.1"', 14, "must be a int or float, got '0.1'"),
        ("mc_samples = 2", "mc_samples = true", 24, "mc_samples"),
        ("epochs = 3", "epochs = true", 7, "epochs must be a whole number"),
        ("epochs = 3", 'epochs = "3"', 7, "must not be in quotes"),
        ("epochs = 3", "epochs = 3.0", 7, "epochs must be a whole number"),
        ("epochs = 5", "epochs = 0", 16, "epochs"),
        ("milestones = [1, 2]", "milestones = 1", 8, "a list"),
        ("milestones = [1, 2]", 'milestones = ["1"]', 8, "list of numbers"),
        ('method = "adam"\n', "", 11, "has no 'method'"),
        ('name = "mine"\n', "", 1, "'name' is missing"),
        ('name = "vogn"\n', "", 16, "'name' is missing"),
        ('method = "vogn"', 'method = "vong"', 18, "Did you mean 'vogn'"),
        ('model = "mlp"', 'model = "mpl"', 5, "Did you mean 'mlp'"),
        ('name = "mine"', 'name = "../mine"', 1, "no path parts"),
        ('name = "adam"', 'name = "a/b"', 12, "no path parts"),
        ('title = "Mine"', "title = 3", 2, "title must be text"),
        ("epochs = 3", "epochs: !!python/object:os.system 3", 7, "Expected '='"),
    ],
)
def test_row_63_mistakes_are_found_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    assert GOOD.count(old) >= 1
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises((InvalidValue, InvalidType)) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b'name = "x"\nrows = []\n', "at least one"),
        (b'name = "x"\n', "'rows' is missing"),
        (b"\x80\x04\x95pickle", "UTF-8"),
        (b"name: mine\nrows:\n - 1\n", "recipe.toml:1"),
    ],
)
def test_row_63_files_that_are_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=message):
        load_recipe(path)


BASE = Training("vogn", "mlp", "digits", {"lr": 1e-3}, {"width": 4})


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("epochs=3", "epochs", 3),
        ("milestones=2,4", "milestones", (2, 4)),
        ("milestones=", "milestones", ()),
        ("augment=true", "augment", True),
        ("train_size=none", "train_size", None),
        ("train_size=50", "train_size", 50),
        ("tempering_from=1e-1", "tempering_from", 0.1),
        ("ood=svhn,mnist", "ood", ("svhn", "mnist")),
        ("data=cifar10", "data", "cifar10"),
        ("lr=0.5", "settings", {"lr": 0.5}),
        ("settings.damping = 2", "settings", {"lr": 1e-3, "damping": 2.0}),
        ("mc_samples=4", "settings", {"lr": 1e-3, "mc_samples": 4}),
        ("vectorized=true", "settings", {"lr": 1e-3, "vectorized": True}),
        ("model_options.width=9", "model_options", {"width": 9}),
    ],
)
def test_overrides_are_read_as_what_the_key_needs(text: str, field: str, value: object) -> None:
    changed = getattr(with_overrides(BASE, parse_assignments([text])), field)
    assert changed == value
    assert str(changed) == str(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch=3", "Did you mean 'epochs'"),
        ("dampnig=1", "Did you mean 'damping'"),
        ("model_options.widht=1", "Did you mean 'model_options.width'"),
        ("epochs=three", "whole number"),
        ("epochs=1.5", "whole number"),
        ("lr=fast", "must be a number"),
        ("augment=yes", "true or false"),
        ("vectorized=1", "true or false"),
        ("milestones=1,x", "whole number"),
        ("epochs", "no key=value"),
        ("=3", "no key=value"),
    ],
)
def test_row_63_overrides_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises((InvalidValue, InvalidType), match=message):
        with_overrides(BASE, parse_assignments([text]))


def test_row_63_a_key_twice() -> None:
    with pytest.raises(InvalidValue, match="set twice"):
        parse_assignments(["lr=1", "lr=2"])


@pytest.mark.parametrize("value", [{"epochs": True}, {"epochs": 2.0}, {"mc_samples": True}, {"augment": 1}])
def test_row_63_values_from_python_must_have_the_type(value: dict[str, object]) -> None:
    with pytest.raises(InvalidType):
        with_overrides(BASE, value)


def test_options_follow_the_method_that_is_set_beside_them() -> None:
    changed = with_overrides(BASE, parse_assignments(["beta1=0.5", "method=adam"]))
    assert (changed.method, changed.settings["beta1"]) == ("adam", 0.5)


@pytest.mark.parametrize(
    ("value", "expected"), [("-6", -6.0), (-6.0, -6.0), (-6, -6), ("relative", "relative")], ids=repr
)
def test_a_number_may_stand_in_place_of_a_word(value: object, expected: object) -> None:
    """Where σ starts in Bayes by Backprop: "relative" to the weights unless given, or a number."""
    training = with_overrides(Training("bbb", "mlp", "digits"), {"initial_log_variance": value})
    assert training.settings == {"initial_log_variance": expected}
    check_training(training)
    with pytest.raises(InvalidType, match="initial_log_variance"):
        with_overrides(training, {"initial_log_variance": "relativ"})
    with pytest.raises(InvalidType, match="initial_log_variance"):
        check_training(replace(training, settings={"initial_log_variance": True}))
