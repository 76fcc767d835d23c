"""MC-dropout through `predict`: functions, not noise, and nothing else of the model in training mode."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue
from credo.predict.dropout import FixedMasks
from tests.predict.models import generator


def images(n: int = 6) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=generator())


class Net(nn.Module):
    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.conv, self.norm, self.maps = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(p)
        self.units, self.fc = nn.Dropout(p, inplace=True), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.units(self.maps(self.norm(self.conv(x))).flatten(1)))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x, 0.5, training=self.training))


def by_hand(model: Net, x: Tensor, kept_maps: Tensor, kept_units: Tensor) -> Tensor:
    with torch.no_grad():
        h = model.norm.eval()(model.conv(x)) * kept_maps.view(1, 4, 1, 1) / 0.6
        return model.fc(h.flatten(1) * kept_units / 0.6).softmax(-1)


def test_a_sample_is_a_network_with_one_set_of_units_dropped() -> None:
    """Every answer of one sample must come from one mask: found by recording the masks that were drawn."""
    model, drawn = Net(), []
    original = FixedMasks._kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedMasks, "_kept", lambda *args: drawn.append(original(*args)) or drawn[-1])
        samples = credo.predict(
            model, credo.DropoutPosterior(model), images(), samples=3, keep_samples=True
        ).samples
    assert len(drawn) == 6
    for i in range(3):
        torch.testing.assert_close(
            samples[i], by_hand(model, images(), drawn[2 * i].flatten(), drawn[2 * i + 1])
        )


def test_functions_are_the_same_for_every_batch_and_any_batch_size() -> None:
    model = Net()
    q = credo.DropoutPosterior(model)
    whole = credo.predict(model, q, images(), samples=4, seed=3, keep_samples=True).samples
    split = credo.predict(model, q, images(), samples=4, seed=3, keep_samples=True, batch_size=2).samples
    longer = credo.predict(model, q, images(), samples=7, seed=3, keep_samples=True).samples
    torch.testing.assert_close(split, whole)
    assert torch.equal(longer[:4], whole)
    assert not torch.equal(credo.predict(model, q, images(), samples=4, seed=4).probs, whole.mean(0))


def test_masks_have_the_rate_and_the_scale_of_dropout() -> None:
    """E[mask·x/(1−p)] = x, and dropped units are zero; alpha dropout keeps mean 0 and variance 1."""
    x = torch.randn(1, 40_000, dtype=torch.float64, generator=generator())
    with FixedMasks(1):
        dropped, alpha = F.dropout(x, 0.3), F.alpha_dropout(x, 0.3, training=True)
    assert abs(float((dropped == 0).double().mean()) - 0.3) < 0.01
    torch.testing.assert_close(dropped[dropped != 0], x[dropped != 0] / 0.7)
    assert abs(float(alpha.mean())) < 0.02
    assert abs(float(alpha.var()) - 1) < 0.03


@pytest.mark.parametrize("drop", [F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout])
def test_whole_channels_go_together(drop: object) -> None:
    dims = {F.dropout1d: 1, F.dropout3d: 3}.get(drop, 2)
    x = torch.ones(2, 50, *[3] * dims)
    with FixedMasks(2):
        y = drop(x, 0.5, training=True).flatten(2)
    assert torch.equal(y, y[:1, :, :1].expand_as(y))
    assert len(y.unique()) == 2


def test_ends_of_the_range_and_switched_off() -> None:
    x = torch.ones(2, 5)
    with FixedMasks(0):
        assert torch.equal(F.dropout(x, 1.0), torch.zeros(2, 5))
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        written = x.clone()
        result = F.dropout(written, 0.5, inplace=True)
    assert result is written
    assert not torch.equal(written, x)


def test_the_mean_over_many_masks_is_torchs_own_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    x = torch.randn(3, 4, generator=generator())
    found = credo.predict(model, credo.DropoutPosterior(model), x, samples=3000).probs
    with torch.random.fork_rng(), torch.no_grad():
        truth = model.train()(x.repeat(20_000, 1)).softmax(-1).view(20_000, 3, 3).mean(0)
    torch.testing.assert_close(found, truth, atol=0.02, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_global_stream_stay_untouched(training: bool) -> None:
    model = Net().train(training)
    before, modes = deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.rand(1)
    stream = torch.get_rng_state()
    credo.predict(model, credo.DropoutPosterior(model), images())
    assert torch.equal(torch.get_rng_state(), stream)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), 1),
        nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True),
    ],
    ids=["encoder", "layer"],
)
def test_attention_drops_too(model: nn.Module) -> None:
    """In eval mode torch takes a path of its own here, on which nothing would be dropped."""
    x, q = torch.randn(3, 5, 8, generator=generator()), credo.DropoutPosterior(model)
    options = {"samples": 3, "task": "regression", "keep_samples": True}
    samples = credo.predict(model, q, x, **options).samples
    assert not torch.allclose(samples[0], samples[1])
    twice = credo.predict(model, q, [x, x], **options).samples
    torch.testing.assert_close(twice[:, :3], twice[:, 3:])
    torch.testing.assert_close(twice[:, :3], samples)


def test_functional_dropout_is_named_by_the_user() -> None:
    model, x = Functional(), torch.randn(3, 4, generator=generator())
    with pytest.raises(InvalidValue, match="drops nothing"):
        credo.DropoutPosterior(model)
    samples = credo.predict(model, credo.DropoutPosterior(model, also=[""]), x, keep_samples=True).samples
    assert not torch.allclose(samples[0], samples[1])


def test_a_loader_that_draws_is_not_disturbed_by_the_masks() -> None:
    model = Net()

    def loader() -> object:
        for _ in range(2):
            yield torch.randn(2, 3, 8, 8)

    probs = credo.predict(model, credo.DropoutPosterior(model), loader()).probs
    assert not torch.allclose(probs[:2], probs[2:])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: credo.DropoutPosterior(Net(p=0.0)), InvalidValue, "drops nothing"),
        (lambda: credo.DropoutPosterior(Net(), also=["nrom"]), InvalidValue, "nrom"),
        (lambda: credo.DropoutPosterior(Net(), also="norm"), InvalidType, "list of module names"),
        (lambda: credo.DropoutPosterior("net"), InvalidType, "torch.nn.Module"),
        (
            lambda: credo.predict(Net(), credo.DropoutPosterior(Net()), images()),
            InvalidValue,
            "not the one",
        ),
    ],
)
def test_bad_input(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
