"""A training that goes wrong says so, once, with the layer and the number; one that goes well says nothing."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import TrainingWarning
from credo.optim import loss_history, monitor

METHODS = [credo.VOGN, credo.OGN, credo.IVON, credo.KFAC, credo.NoisyKFAC, credo.BayesByBackprop]
NOISY = {  # what makes the noise of each method too large
    credo.VOGN: {"lr": 1e-6, "damping": 1e-4, "tempering": 1.0, "prior_precision": 1e-2},
    credo.IVON: {"lr": 1e-6, "initial_curvature": 1e-4, "prior_precision": 1e-2},
    credo.NoisyKFAC: {"lr": 1e-6, "damping": 1e-4, "prior_precision": 1e-2},
    credo.BayesByBackprop: {"lr": 1e-6, "initial_log_variance": 4.0},
}

QUIET = {method: {"tempering": 1e-6} for method in METHODS} | {
    credo.BayesByBackprop: {"initial_log_variance": -20.0}
}


@pytest.fixture
def soon(monkeypatch):
    """All looks come early, so that a training of 120 steps has had them all."""
    monkeypatch.setattr(monitor, "FIRST_LOOKS", (1, 10, 40))
    monkeypatch.setattr(monitor, "EVERY", 40)
    monkeypatch.setattr(monitor, "WINDOW", 20)
    monkeypatch.setattr(loss_history, "LOOKS", (100,))


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(shape: tuple[int, ...], count: int = 3, examples: int = 192) -> tuple[Tensor, Tensor]:
    """A class is a direction in which its examples lie."""
    y = torch.randint(0, count, (examples,), generator=drawn(1))
    centres = torch.randn(count, *shape, generator=drawn(2))
    return centres[y] + 0.7 * torch.randn(examples, *shape, generator=drawn(3)), y


def sentences() -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 3, (192,), generator=drawn(1))
    tokens = torch.randint(0, 9, (192, 6), generator=drawn(2))
    tokens[:, ::2] = 9 + y.unsqueeze(1)
    return tokens, y


def curve() -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(192, 3, generator=drawn(1)) - 1
    return x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(192, 1, generator=drawn(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8), nn.Parameter(torch.zeros(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(tokens) + self.places).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


PROBLEMS: dict[str, tuple[Callable, Callable, Callable]] = {
    "mlp": (mlp, lambda: classes((12,)), F.cross_entropy),
    "cnn": (cnn, lambda: classes((1, 8, 8)), F.cross_entropy),
    "transformer": (Transformer, sentences, F.cross_entropy),
    "regression": (lambda: nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1)), curve, F.mse_loss),
}


def built(make: Callable) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def train(optimizer, model, x, y, loss, steps: int = 120, blocks: bool = False) -> list[str]:
    """The warnings of some steps; with `blocks`, by sampled() blocks and steps without a closure."""
    order = drawn(4)

    def closure() -> Tensor:
        rows = torch.randint(0, len(x), (16,), generator=order)
        optimizer.zero_grad()
        value = loss(model(x[rows]), y[rows])
        value.backward()
        return value

    def run() -> None:
        for _ in range(steps):
            if blocks:
                with optimizer.sampled():
                    closure()
            optimizer.step(None if blocks else closure)

    return warned(run)


def warned(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    ours = [one for one in caught if issubclass(one.category, TrainingWarning)]
    assert all(one.filename == __file__ for one in ours)  # where the step was called
    return [str(one.message) for one in ours]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_training_is_silent(method, problem, soon):
    make, data, loss = PROBLEMS[problem]
    model, (x, y) = built(make), data()
    assert train(method(model, data_size=len(x)), model, x, y, loss) == []


def without_signal() -> tuple[Tensor, Tensor]:
    """Labels that have nothing to do with the inputs: the loss cannot fall."""
    return classes((12,))[0], torch.randint(0, 3, (192,), generator=drawn(9))


@pytest.mark.parametrize("blocks", [False, True], ids=["closure", "blocks"])
@pytest.mark.parametrize("method", NOISY)
def test_noise_larger_than_the_weights(method, blocks, soon):
    """Of which nothing is learned: the loss is too small for any curvature."""
    model, (x, y) = built(mlp), without_signal()
    optimizer = method(model, data_size=20, **NOISY[method])
    found = train(optimizer, model, x, y, lambda z, t: 1e-9 * F.cross_entropy(z, t), 120, blocks)
    noise = [text for text in found if "noise drowns" in text]
    signal = [text for text in found if "stays below 0.1" in text]
    assert len(noise) == len(signal) == 1
    for text in (*noise, *signal):
        assert any(f"layer '{k}'" in text for k in (0, 2, 4))
        assert method.__name__ in text
        assert "tempering" in text
    layers = optimizer.diagnostics(by="layer")
    assert min(own.signal_to_noise for own in layers.values()) < 0.1


@pytest.mark.parametrize("method", [credo.OGN, credo.KFAC])
def test_methods_that_train_without_noise_do_not_speak_of_it(method, soon):
    model, (x, y) = built(mlp), without_signal()
    optimizer = method(model, data_size=20, lr=1e-6, damping=1e-4, prior_precision=1e-2)
    found = train(optimizer, model, x, y, F.cross_entropy, steps=60)
    assert not any("noise" in text for text in found)


@pytest.mark.parametrize("blocks", [False, True], ids=["closure", "blocks"])
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_does_not_fall(method, blocks, soon):
    """A step so small that nothing is learned, under little noise; the batches are all alike."""
    make, data, loss = PROBLEMS["transformer"]
    model, (x, y) = built(make), (column[:1].repeat_interleave(16, 0) for column in data())
    optimizer = method(model, data_size=192, lr=1e-9, **QUIET[method])
    found = train(optimizer, model, x, y, loss, blocks=blocks)
    assert len(found) == 1, found
    assert "not fallen in" in found[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_grows(method, soon):
    model, (x, y) = built(mlp), classes((12,))
    optimizer = method(model, data_size=len(x))

    def run() -> None:
        for k in range(100):
            optimizer.step(lambda k=k: F.cross_entropy(model(x[:16]), y[:16], reduction="none") + 1.3**k)

    (text,) = [text for text in warned(run) if "diverges" in text]
    assert re.search(
        r"training diverges: the loss has grown from [\d.]+ to [\d.e+]+ by step \d+. Lower lr", text
    )


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_grow(method, soon):
    """As if an update had done it."""
    model, (x, y) = built(mlp), classes((12,))
    optimizer = method(model, data_size=len(x))

    def run() -> None:
        for step in range(12):
            with torch.no_grad():
                model[2].weight.mul_(1e6 if step == 8 else 1.0)
            optimizer.step(lambda: F.cross_entropy(model(x[:16]), y[:16], reduction="none") * 1e-12)

    (text,) = [text for text in warned(run) if "diverges" in text]
    assert re.search(r"weights of layer '2' have grown from 0.1\d* \(rms\) to [\d.]+e\+0\d by step 10", text)


@pytest.mark.parametrize("outputs", [1, 2])
def test_ivon_on_targets_that_nobody_has_scaled(outputs):
    """At a rate of its own, without a refused step, it ends far away."""
    model = built(lambda: nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, outputs)))
    x, y = curve()
    optimizer = credo.IVON(model, 0.2, data_size=len(x))
    found = train(optimizer, model, x, 100 + 100 * y.expand(-1, outputs), F.mse_loss, steps=60)
    assert optimizer.counters["refused"] == 0
    assert sum("training diverges" in text for text in found) == 1


@pytest.mark.parametrize("blocks", [False, True], ids=["closure", "blocks"])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_refused_step(method, blocks):
    model, (x, y) = built(mlp), classes((12,))
    optimizer = method(model, data_size=len(x))

    def closure(factor: float) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:16]), y[:16]) * factor
        loss.backward()
        return loss

    def step(factor: float) -> None:
        if blocks:
            with optimizer.sampled():
                closure(factor)
        optimizer.step(None if blocks else lambda: closure(factor))

    step(1.0)
    expected = r"gradient of '0.weight'.*6 of 6" if blocks else "the loss is nan"
    (text,) = warned(lambda: [step(float("nan")), step(float("nan"))])
    assert re.search(f"step 2 was refused.*{expected}", text)
    assert optimizer.counters["refused"] == 2


@pytest.mark.parametrize("method", METHODS)
def test_squares_that_overflow(method):
    model, (x, y) = built(mlp), classes((12,))
    optimizer = method(model, data_size=len(x), reduction="sum")
    (text,) = warned(
        lambda: optimizer.step(lambda: F.cross_entropy(model(x[:16]), y[:16], reduction="none") * 1e28)
    )
    assert re.search(
        r"(curvature of '\d.\w+' is not finite|overflows).*gradient, [\d.]+e\+2\d, is that of '", text
    )


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_a_run_that_goes_on_at_a_plateau_is_silent(how, soon):
    make, data, loss = PROBLEMS["transformer"]
    model, (x, y) = built(make), data()
    optimizer = credo.VOGN(model, data_size=len(x), lr=1e-9, tempering=1e-4)
    train(optimizer, model, x, y, loss, steps=30)
    if how == "state_dict":
        again = credo.VOGN(model, data_size=len(x), lr=1e-9, tempering=1e-4)
        again.load_state_dict(optimizer.state_dict())
        twin = model
    elif how == "deepcopy":
        twin, again = copy.deepcopy((model, optimizer))
    else:
        twin, again = pickle.loads(pickle.dumps((model, optimizer)))
    assert train(again, twin, x, y, loss) == []
