"""Many weight samples in one run, layer by layer: the answer of one sample after the other, or credo's own error."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import UnsupportedOperation
from tests.optim.replay import snapshot
from tests.optim.stacked_cases import (
    BATCH_NORM,
    EXACT,
    REFUSED,
    ROWS,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    M,
    T,
    Then,
    build,
    sequence,
)
from tests.optim.test_many_samples import SLICED, first_samples, sliced_means


def steps(make, shape, vectorized: bool, count: int = 2, **options) -> tuple:
    model, x, y = build(make, shape)
    optimizer = credo.VOGN(model, data_size=50, mc_samples=3, vectorized=vectorized, **options)
    losses = [optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none")) for _ in range(count)]
    return snapshot(model), optimizer.curvature(), torch.stack(losses)


@pytest.mark.parametrize("start", [None, 0.5], ids=["from the first minibatch", "given"])
@pytest.mark.parametrize("name", EXACT)
def test_vectorised(name, start):
    """In the first step of a default optimiser no weight has a width yet, and all samples are one."""
    options = {"initial_curvature": start, "lr": 0.1, "damping": 1.0, "tempering": 1.0}
    one_by_one, together = (steps(*EXACT[name], vectorized=v, **options) for v in (False, True))
    torch.testing.assert_close(one_by_one, together, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EXACT)
def test_slices(name):
    model, x, y = build(*EXACT[name])
    g, h = sliced_means(model, first_samples(model, 2), x, y)
    before = snapshot(model)
    optimizer = credo.VOGN(model, mc_slices=2, **SLICED)
    optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    for key, mean in before.items():
        s = 0.9 * 0.5 + 0.1 * h[key]
        torch.testing.assert_close(optimizer.curvature()[key], s, rtol=1e-9, atol=1e-12)
        moved = model.get_parameter(key).detach()
        torch.testing.assert_close(moved, mean - g[key] / (s + 1.0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("start", [None, 0.5], ids=["from the first minibatch", "given"])
@pytest.mark.parametrize("options", [{"mc_slices": 2}, {"mc_samples": 3, "vectorized": True}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_at_the_first_step(name, options, start):
    model, x, y = build(*REFUSED[name])
    before = snapshot(model)
    optimizer = credo.VOGN(model, data_size=50, initial_curvature=start, **options)
    with pytest.raises(UnsupportedOperation, match=r"(?s)without vectorized|vectorized=False"):
        optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))
    assert all(torch.equal(before[key], p) for key, p in model.named_parameters())


@pytest.mark.parametrize("name", BATCH_NORM)
def test_batch_norm_has_no_vectorised_form(name):
    """Its running statistics would move once, where K samples move them K times."""
    with pytest.raises(UnsupportedOperation, match=r"batch_norm.*vectorized=False"):
        steps(BATCH_NORM[name], ROWS, vectorized=True)


def test_frozen_recurrent_layers_run_for_all_samples_at_once():
    """Their inputs differ by sample; vmap itself has no rule for them."""

    def frozen() -> nn.Module:
        layers = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 5, batch_first=True).requires_grad_(False)
        return nn.Sequential(layers[0], Then(layers[1], sequence))

    options = {"initial_curvature": 0.5, "lr": 0.1, "damping": 1.0, "tempering": 1.0}
    one_by_one, together = (steps(frozen, TOKENS, vectorized=v, **options) for v in (False, True))
    torch.testing.assert_close(one_by_one, together, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_dropout_has_masks_of_its_own_for_each_sample(probability):
    """Only that a step is finite and the same again: the masks are other ones than those of samples in turn."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Dropout(probability), nn.TransformerEncoderLayer(4, 2, 8, probability, batch_first=True)
        )

    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = steps(make, SEQUENCE, vectorized=True)
        torch.manual_seed(1)
        again = steps(make, SEQUENCE, vectorized=True)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert all(p.isfinite().all() for p in first[0].values())


def test_an_operation_that_vmap_cannot_follow_is_named_with_the_remedy():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = credo.VOGN(model, data_size=50, mc_samples=2, initial_curvature=1.0, vectorized=True)

    def closure() -> Tensor:
        out = model(x)
        return out.sum(1) * (1.0 if out.sum().item() > 0 else 2.0)

    with pytest.raises(UnsupportedOperation, match=r"(?s)vectorized=False.*item"):
        optimizer.step(closure)


def test_a_recurrent_layer_in_single_precision():
    """Single precision, where torch's own kernels do not check the shape of a state."""
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 4), Then(nn.LSTM(4, 5, batch_first=True), sequence), nn.Flatten()
    )
    x = torch.randint(0, VOCABULARY, (M, T))
    optimizer = credo.VOGN(model, data_size=50, mc_samples=3, vectorized=True)
    losses = [optimizer.step(lambda: model(x).square().mean(1)) for _ in range(3)]
    assert torch.stack(losses).isfinite().all()
