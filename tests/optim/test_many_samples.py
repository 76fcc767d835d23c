"""Slices with samples of their own, and vectorised samples, against one sample after the other."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.optim.statistics import SquareStatistics
from tests.optim.replay import clone_with, snapshot


class Scaled(nn.Module):
    """Bare parameters among the layers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.scale, self.shift = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(()))
        self.activation = nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.inner(x)) * self.scale + self.shift


class Merged(nn.Module):
    """A layer that sees the positions of all examples as rows."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.view(-1, 4)).tanh().view(len(x), 15))


class Squared(nn.Module):
    """An operation without a rule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (7, 4)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), (7, 4)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(15, 3)),
        (7, 3, 4),
    ),
    "convolution": (convolutional, (7, 2, 6, 6)),
    "convolutions": (
        lambda: nn.Sequential(
            *(
                nn.Conv2d(2, 4, 3, padding=1),
                nn.Tanh(),
                nn.Conv2d(4, 6, 2, 2, groups=2, bias=False),
                nn.Tanh(),
            ),
            *(nn.Conv2d(6, 3, 2, dilation=2, padding="valid"), nn.Flatten(), nn.Linear(3, 3)),
        ),
        (7, 2, 6, 6),
    ),
    "convolutions in one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 3, 2), nn.Flatten(), nn.Linear(6, 3)
        ),
        (7, 2, 7),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.Flatten(), nn.Linear(32, 3)),
        (7, 2, 3, 3),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), (7, 4)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
        (7, 2, 6, 6),
    ),
    "bare parameters": (lambda: nn.Sequential(Scaled(), nn.Linear(5, 3)), (7, 4)),
    "twice": (
        lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)))(nn.Linear(4, 4)),
        (7, 4),
    ),
}


SLICED_ONLY = {"merged": (Merged, (7, 3, 4))}


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, shape = (MODELS | SLICED_ONLY)[name]
        return make().double(), torch.randn(shape, dtype=torch.float64), torch.arange(shape[0]) % 3


@pytest.mark.parametrize("name", [n for n in MODELS if n != "batch norm"])
def test_vectorised_samples_are_those_taken_one_after_the_other(name, both_kernels):
    def run(vectorized: bool) -> tuple:
        model, x, y = build(name)
        optimizer = credo.VOGN(
            model, data_size=50, mc_samples=3, initial_curvature=0.5, vectorized=vectorized
        )
        losses = [optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none")) for _ in range(3)]
        return snapshot(model), optimizer.curvature(), torch.stack(losses), dict(optimizer.counters)

    torch.testing.assert_close(run(False), run(True), rtol=1e-10, atol=1e-12)


SLICED = {
    "data_size": 50,
    "initial_curvature": 0.5,
    "momentum": 0.0,
    "prior_precision": 0.0,
    "lr": 1.0,
    "damping": 1.0,
}


def first_samples(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """The samples that an optimiser with these settings draws first."""
    looker = credo.VOGN(model, **SLICED)
    samples = []
    for _ in range(count):
        with looker.sampled():
            samples.append(snapshot(model))
    return samples


@pytest.mark.parametrize("name", [n for n in (*MODELS, *SLICED_ONLY) if n != "batch norm"])
@pytest.mark.parametrize("slices", [2, 3, 7, 20])
def test_slices_have_samples_of_their_own(name, slices, both_kernels):
    model, x, y = build(name)
    samples = first_samples(model, slices)
    g, h = sliced_means(model, samples[: len(x)], x, y)
    before = snapshot(model)
    optimizer = credo.VOGN(model, mc_slices=slices, **SLICED)
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for key, mean in before.items():
        s = 0.9 * 0.5 + 0.1 * h[key]
        torch.testing.assert_close(optimizer.curvature()[key], s, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            model.get_parameter(key).detach(), mean - g[key] / (s + 1.0), rtol=1e-9, atol=1e-12
        )


def sliced_means(model, samples, x, y):
    """ĝ and ĥ, example by example, each at the weights of its slice."""
    owner = torch.cat(
        [
            torch.full((len(part),), k)
            for k, part in enumerate(torch.arange(len(x)).tensor_split(len(samples)))
        ]
    )
    g = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    h = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        twin = clone_with(model, samples[int(owner[i])])
        grads = torch.autograd.grad(
            F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]), list(twin.parameters())
        )
        for name, grad in zip(g, grads, strict=True):
            g[name] += grad / len(x)
            h[name] += grad.square() / len(x)
    return g, h


def test_batch_norm_sees_the_slices_together(both_kernels):
    """Its statistics are those of the whole batch: the forward equals slices put together before the norm."""
    model, x, y = build("batch norm")
    samples, norm = first_samples(model, 2), model[1]
    halves = torch.arange(len(x)).tensor_split(2)
    hidden = torch.cat(
        [F.linear(x[part], samples[k]["0.weight"], samples[k]["0.bias"]) for k, part in enumerate(halves)]
    )
    normed = F.batch_norm(hidden, None, None, norm.weight, norm.bias, training=True)
    out = torch.cat(
        [
            F.linear(normed[part], samples[k]["2.weight"], samples[k]["2.bias"])
            for k, part in enumerate(halves)
        ]
    )
    optimizer = credo.VOGN(model, mc_slices=2, **SLICED)
    with optimizer.sampled():
        seen = model(x)
        F.cross_entropy(seen, y).backward()
    torch.testing.assert_close(seen.detach(), out.detach(), rtol=1e-12, atol=1e-12)
    optimizer.step()


def test_the_parameters_hold_the_mean_while_operations_see_samples():
    model, x, _ = build("mlp")
    optimizer = credo.VOGN(model, data_size=50, mc_slices=2, initial_curvature=1.0)
    before = snapshot(model)
    with optimizer.sampled():
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        assert not torch.allclose(model(x), clone_with(model, before)(x))


REFUSED = {
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "bilinear": Squared,
}


@pytest.mark.parametrize("build_model", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("options", [{"mc_slices": 2}, {"mc_samples": 2, "vectorized": True}])
def test_what_cannot_have_many_weights_is_refused_by_name(build_model, options):
    model = build_model()
    before = snapshot(model)
    optimizer = credo.VOGN(model, data_size=50, initial_curvature=1.0, **options)
    x = torch.randn(4, 4)
    with pytest.raises(UnsupportedOperation, match=r"slices|vectorized"):
        optimizer.step(lambda: model(x).sum(1))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_vectorised_batch_norm_is_refused():
    model, x, y = build("batch norm")
    optimizer = credo.VOGN(model, data_size=50, mc_samples=2, vectorized=True, initial_curvature=1.0)
    with pytest.raises(UnsupportedOperation, match=r"batch_norm.*vectorized=False"):
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))


def test_vectorised_and_sliced_exclude_each_other():
    with pytest.raises(InvalidValue, match="exclude"):
        credo.VOGN(nn.Linear(2, 2), data_size=5, mc_slices=2, vectorized=True)


def test_a_closure_that_calls_backward_cannot_be_vectorised():
    model, x, y = build("mlp")
    optimizer = credo.VOGN(model, data_size=50, mc_samples=2, vectorized=True, initial_curvature=1.0)
    before = snapshot(model)

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(credo.errors.CallOrderError, match=r"vectorized.*without calling backward"):
        optimizer.step(closure)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_vectorised_closure_must_return_a_tensor():
    model = torch.nn.Linear(4, 3)
    optimizer = credo.VOGN(model, data_size=100, initial_curvature=1.0, mc_samples=3, vectorized=True)
    with pytest.raises(InvalidType, match="tensor"):
        optimizer.step(lambda: 1.0)


def test_the_squares_of_a_sample_are_dropped_once_they_are_added(monkeypatch):
    """K samples in turn take the memory of two, not of K."""
    model, seen, alive = nn.Linear(3, 2), [], []
    optimizer = credo.VOGN(model, data_size=100, mc_samples=4)
    add = SquareStatistics._add

    def remembered(self, stats, *others):
        seen.append(weakref.ref(stats.squares[id(model.weight)]))
        add(self, stats, *others)

    def closure():
        alive.append(sum(square() is not None for square in seen))
        return F.cross_entropy(model(torch.ones(5, 3)), torch.zeros(5, dtype=torch.int64), reduction="none")

    monkeypatch.setattr(SquareStatistics, "_add", remembered)
    optimizer.step(closure)
    assert alive == [0, 1, 1, 1]
