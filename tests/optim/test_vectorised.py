"""What a vectorised closure may compute after its layers, and what it may not; against one sample after the other."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import UnsupportedOperation
from tests.optim.replay import snapshot

WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
LOSSES = {
    "none": lambda z, y: F.cross_entropy(z, y, reduction="none"),
    "class weights": lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, reduction="none"),
    "ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=1, reduction="none"),
    "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2, reduction="none"),
    "a module": lambda z, y: nn.CrossEntropyLoss(reduction="none")(z, y),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, 3).double(), reduction="none"),
    "named": lambda z, y: F.cross_entropy(input=z, target=y, reduction="none"),
    "by hand": lambda z, y: -z.log_softmax(1)[torch.arange(len(y)), y],
    "logits and squares": lambda z, y: F.cross_entropy(z, y, reduction="none") + z.square().sum(1),
}


class Recurring(nn.Module):
    """The input comes back after the first layer, and with a dimension of its own between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu() + x
        stacked = torch.stack([hidden, self.second(x)], 1)  # (M, 2, 4)
        return self.third(stacked).mean(1) + self.third(hidden.T.contiguous().T)


def steps(loss, *, vectorized: bool, dtype: torch.dtype = torch.float64, **options) -> tuple:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Recurring().to(dtype), torch.randn(7, 4, dtype=dtype), torch.arange(7) % 3
    optimizer = credo.VOGN(
        model, data_size=50, mc_samples=3, initial_curvature=0.5, vectorized=vectorized, **options
    )
    losses = [optimizer.step(lambda: loss(model(x), y)) for _ in range(3)]
    return snapshot(model), optimizer.curvature(), torch.stack(losses)


@pytest.mark.parametrize("many", [1, 512], ids=["transposed", "as they are"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, many, both_kernels, monkeypatch):
    monkeypatch.setattr("credo.curvature.vmap.MANY", many)
    one_by_one, together = (steps(LOSSES[name], vectorized=v) for v in (False, True))
    torch.testing.assert_close(one_by_one, together, rtol=1e-10, atol=1e-12)


def test_frozen_layers_have_one_value(both_kernels):
    """A bias without a width among weights with one: the general way, not one product."""

    def run(vectorized: bool) -> tuple:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
            x, y = torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 3
        groups = [
            {"params": [model[0].bias, model[2].bias], "deterministic": True},
            {"params": [model[0].weight, model[2].weight]},
        ]
        optimizer = credo.VOGN(
            groups, data_size=50, mc_samples=3, initial_curvature=0.5, vectorized=vectorized
        )
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
        return snapshot(model), optimizer.curvature()

    torch.testing.assert_close(run(False), run(True), rtol=1e-10, atol=1e-12)


def test_an_input_may_ask_for_its_gradient(both_kernels):
    def run(vectorized: bool) -> tuple:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, x = Recurring().double(), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        optimizer = credo.VOGN(
            model, data_size=50, mc_samples=3, initial_curvature=0.5, vectorized=vectorized
        )
        optimizer.step(lambda: F.cross_entropy(model(x), torch.arange(7) % 3, reduction="none"))
        return snapshot(model), x.grad / (1 if vectorized else 3)  # the mean over samples, or their sum

    torch.testing.assert_close(run(False), run(True), rtol=1e-10, atol=1e-12)


def test_autocast_runs_in_half_precision_and_learns_in_single():
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert z.dtype == torch.bfloat16
        return F.cross_entropy(z, y, reduction="none")

    with torch.autocast("cpu", torch.bfloat16):
        mean, curvature, _ = steps(loss, vectorized=True, dtype=torch.float32)
    single, squares, _ = steps(LOSSES["none"], vectorized=True, dtype=torch.float32)
    torch.testing.assert_close(mean, single, rtol=0, atol=2e-2)
    torch.testing.assert_close(curvature, squares, rtol=0.1, atol=2e-2)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.vmap], ids=["vmap", "func.vmap"])
def test_a_transform_inside_the_closure_is_refused(transform):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = credo.VOGN(model, data_size=50, mc_samples=2, initial_curvature=1.0, vectorized=True)
    before = snapshot(model)
    with pytest.raises(UnsupportedOperation, match=r"transform.*vectorized=False"):
        optimizer.step(lambda: transform(lambda row: model(row).sum())(x))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_an_error_in_the_closure_closes_the_level():
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.arange(5) % 3
    optimizer = credo.VOGN(model, data_size=50, mc_samples=2, initial_curvature=1.0, vectorized=True)

    def broken() -> Tensor:
        model(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(broken)
    assert not torch._C._are_functorch_transforms_active()
    optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))


def test_a_step_leaves_no_graph_behind():
    """Not even until the garbage collector comes, which in a training loop is many steps later."""
    model, seen = nn.Linear(4, 3), []
    optimizer = credo.VOGN(model, data_size=100, initial_curvature=1.0, mc_samples=3, vectorized=True)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def closure() -> Tensor:
        logits = model(x)
        seen.append(weakref.ref(logits))
        return F.cross_entropy(logits, y, reduction="none")

    gc.disable()
    try:
        optimizer.step(closure)
        assert seen[0]() is None
    finally:
        gc.enable()


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = (
            nn.Embedding(9, 4),
            nn.LSTM(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(tokens))[0][:, -1])


@pytest.mark.parametrize(("make", "samples"), [(credo.VOGN, 1), (credo.VOGN, 2), (credo.BayesByBackprop, 1)])
def test_one_sample_is_no_special_case(make, samples):
    """The default of mc_samples is 1: there is nothing to compute together then."""

    def run(vectorized: bool) -> tuple:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, tokens = Sentences().double(), torch.randint(9, (6, 5))
        optimizer = make(model, data_size=50, mc_samples=samples, vectorized=vectorized)
        targets = torch.arange(6) % 3
        losses = [
            optimizer.step(lambda: F.cross_entropy(model(tokens), targets, reduction="none"))
            for _ in range(3)
        ]
        return snapshot(model), optimizer.posterior().variance, torch.stack(losses)

    torch.testing.assert_close(run(False), run(True), rtol=1e-10, atol=1e-12)
