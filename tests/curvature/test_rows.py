"""Between the model and the loss every example stays by itself: programs that keep them apart, and that do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import CredoError, UnsupportedOperation
from tests.curvature.oracle import mean_loss, plain_backward, relative_error, squares_by_loop, target_for

M, D = 6, 6  # as many features as examples, so that shapes tell nothing
PERM = torch.tensor([2, 0, 1, 5, 3, 4])
ADJACENCY = (torch.rand(M, M, generator=torch.Generator().manual_seed(0)) < 0.5).double()


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.inner, self.outer, self.program = nn.Linear(D, D), nn.Linear(D, D), program
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self, x)


class Reversed(torch.autograd.Function):
    """A custom function that keeps examples apart."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Shuffled(torch.autograd.Function):
    """One that does not."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


def written(m: Net, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    z = m.inner(x)
    for k in range(D):
        out[:, k] = z[:, D - 1 - k] * 2
    return out


def written_by_rows(m: Net, x: Tensor) -> Tensor:
    z = m.inner(x)
    out = torch.zeros_like(z)
    for i in range(len(x)):
        out[i] = z[i] * 2
    return out


def back(x: Tensor) -> Tensor:
    return PERM[len(x) > PERM]


def by_heads(z: Tensor) -> Tensor:
    """(M, D) → (M, 3, 2) → (M·3, 2) and back, with a product for each head."""
    rows = z.view(-1, 3, 2).reshape(-1, 2)
    return (rows @ torch.ones(2, 2, dtype=z.dtype)).view(-1, D)


EXACT = {
    "softmax": lambda m, x: m.inner(x).softmax(1),
    "cumsum": lambda m, x: m.inner(x).cumsum(1),
    "sort": lambda m, x: m.outer(m.inner(x).sort(1).values),
    "topk": lambda m, x: m.inner(x).topk(3, 1).values,
    "flip": lambda m, x: m.inner(x).flip(1),
    "roll": lambda m, x: m.inner(x).roll(1, 1),
    "gather": lambda m, x: m.inner(x).gather(1, x.argsort(1)),
    "index": lambda m, x: m.inner(x)[:, [2, 0, 0]],
    "an element of each row": lambda m, x: m.inner(x)[torch.arange(len(x)), x.argmax(1)].unsqueeze(1),
    "elements of each row": lambda m, x: m.inner(x)[torch.arange(len(x))[:, None], x.argsort(1)[:, :2]],
    "transposed and back": lambda m, x: m.outer((m.inner(x).T * 2).T),
    "heads": lambda m, x: m.outer(by_heads(m.inner(x))),
    "taken apart and joined": lambda m, x: m.outer(torch.cat([z * 2 for z in m.inner(x).split(1)])),
    "unbound and stacked": lambda m, x: m.outer(torch.stack([z.sin() for z in m.inner(x).unbind(0)])),
    "two passes, joined": lambda m, x: torch.cat([m.inner(x), m.inner(x * 2)], 1),
    "there and back again": lambda m, x: m.outer(m.inner(x)[back(x).argsort()][back(x)]),
    "written into columns": written,
    "written into rows": written_by_rows,
    "custom function": lambda m, x: m.outer(Reversed.apply(m.inner(x))),
    "norms": lambda m, x: F.normalize(m.inner(x), dim=1),
    "cosine": lambda m, x: F.cosine_similarity(m.inner(x), m.outer(x)).unsqueeze(1),
    "pooled": lambda m, x: F.max_pool1d(m.inner(x).unsqueeze(1), 2).squeeze(1),
    "an inverse for each": lambda m, x: torch.linalg.inv(
        torch.diag_embed(m.inner(x).exp()) + torch.ones(D, D, dtype=x.dtype)
    ),
    "einsum": lambda m, x: torch.einsum("bi,bj->bij", m.inner(x), m.outer(x)),
    "scattered columns": lambda m, x: torch.zeros_like(x).scatter(1, x.argsort(1), m.inner(x)),
    "spectrum": lambda m, x: torch.view_as_real(torch.fft.rfft(m.inner(x))),
    "repeated": lambda m, x: m.inner(x).repeat_interleave(2, 0).view(len(x), 2, D).sum(1),
}


def build(program, examples: int = M) -> tuple[Net, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(program).double(), torch.randn(examples, D, dtype=torch.float64)


@pytest.mark.parametrize("examples", [M, 3, 1])
@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT.keys())
def test_rows_that_stay_apart(program, examples):
    model, x = build(program, examples)
    target = target_for(model, x)
    truth = squares_by_loop(model, x, target)
    with credo.capture(model) as stats:
        mean_loss(model(x), target).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert relative_error(stats.squares[p], truth[name]) < 1e-9, name


MIXED = {
    "cumsum": (lambda m, x: m.inner(x).cumsum(0), "CumsumBackward0 works along"),
    "softmax": (lambda m, x: m.inner(x).softmax(0), "SoftmaxBackward0 works along"),
    "log-softmax": (lambda m, x: m.inner(x).log_softmax(0), "LogSoftmaxBackward0"),
    "a risk set": (lambda m, x: m.inner(x) - m.inner(x).logcumsumexp(0), "Logcumsumexp"),
    "sort": (lambda m, x: m.inner(x).sort(0).values, "SortBackward0"),
    "topk": (lambda m, x: m.inner(x).topk(4, 0).values, "TopkBackward0"),
    "flip, compared": (lambda m, x: m.inner(x) - m.inner(x).flip(0), "FlipBackward0"),
    "flip, then a layer": (lambda m, x: m.outer(m.inner(x).flip(0)), "FlipBackward0"),
    "roll": (lambda m, x: m.inner(x) * m.inner(x).roll(1, 0), "RollBackward0"),
    "permuted, then a layer": (lambda m, x: m.outer(m.inner(x)[PERM]), "linear reads rows that were moved"),
    "manifold mixup": (
        lambda m, x: m.outer(0.3 * m.inner(x) + 0.7 * m.inner(x)[PERM]),
        "AddBackward0 combines",
    ),
    "pairs by an index": (lambda m, x: (m.inner(x)[PERM] - m.inner(x)).square(), "SubBackward0 combines"),
    "neighbours": (lambda m, x: m.inner(x)[:-1] - m.inner(x)[1:], "SubBackward0 combines"),
    "triplets in one pass": (
        lambda m, x: F.triplet_margin_loss(*m.inner(x).chunk(3), reduction="none"),
        "SubBackward0 combines",
    ),
    "pairs by a view": (lambda m, x: m.inner(x).view(2, 3, D).prod(0), "ViewBackward0|ProdBackward"),
    "index_add": (
        lambda m, x: torch.zeros_like(x).index_add(0, PERM // 2, m.inner(x)),
        "IndexAddBackward0",
    ),
    "scatter_add": (
        lambda m, x: torch.zeros_like(x).scatter_add(0, PERM[:, None].expand(M, D), m.inner(x)),
        "ScatterAddBackward0",
    ),
    "gather": (lambda m, x: m.inner(x).gather(0, PERM[:, None].expand(M, D)), "GatherBackward0"),
    "sparse product": (
        lambda m, x: torch.sparse.mm(ADJACENCY.to_sparse(), m.inner(x)),
        "(Sparse|Mm)",
    ),
    "graph convolutions": (
        lambda m, x: m.outer(torch.sparse.mm(ADJACENCY.to_sparse(), m.inner(x)).relu()),
        "(Sparse|Mm)",
    ),
    "a product": (lambda m, x: ADJACENCY @ m.inner(x), "Mm"),
    "einsum over examples": (lambda m, x: torch.einsum("ab,bd->ad", ADJACENCY, m.inner(x)), "Bmm|Mm"),
    "Gram matrix": (lambda m, x: m.inner(x).T @ m.inner(x), "Mm"),
    "every pair": (lambda m, x: m.inner(x)[:, None] - m.inner(x)[None], "SubBackward0"),
    "distances": (lambda m, x: torch.pdist(m.inner(x)), "Pdist"),
    "custom function": (lambda m, x: m.outer(Shuffled.apply(m.inner(x))), "ShuffledBackward lets rows"),
    "written into other rows": (
        lambda m, x: m.outer(torch.zeros_like(x).index_put((PERM,), m.inner(x))),
        "IndexPutBackward0",
    ),
    "attention over examples": (
        lambda m, x: F.scaled_dot_product_attention(*[m.inner(x)[None, None]] * 3)[0, 0],
        "ScaledDotProduct|Bmm|Softmax|Mm",
    ),
    "interpolated over examples": (
        lambda m, x: F.interpolate(m.inner(x).T[None], scale_factor=2.0, mode="linear")[0].T,
        "Upsample",
    ),
    "a parameter in it": (
        lambda m, x: torch.einsum("ab,bd,d->ad", ADJACENCY, m.inner(x), m.gain),
        "einsum",
    ),
}


@pytest.mark.parametrize(("program", "message"), MIXED.values(), ids=MIXED.keys())
def test_rows_that_meet_are_refused(program, message):
    model, x = build(program)
    with pytest.raises(UnsupportedOperation, match=message), credo.capture(model):
        model(x).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("program", [p for p, _ in MIXED.values()], ids=MIXED.keys())
def test_of_one_example_they_are_exact_or_refused(program):
    model, x = build(program, 1)
    try:
        target = target_for(model, x)
        _, grads = plain_backward(model, x, target)
    except (RuntimeError, IndexError, TypeError):
        return  # it wants more examples
    try:
        with credo.capture(model) as stats:
            mean_loss(model(x), target).backward()
    except CredoError:
        return
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert relative_error(stats.squares[p], grads[name].square()) < 1e-9, name


def test_three_passes_of_a_triplet_are_exact():
    model, x = build(
        lambda m, x: F.triplet_margin_loss(m.inner(x), m.inner(x * 2), m.inner(x.sin()), reduction="none")
    )
    losses = lambda m, x: m(x).unsqueeze(1)  # noqa: E731
    truth = torch.zeros_like(model.inner.weight)
    for i in range(M):
        truth += torch.autograd.grad(losses(model, x[i : i + 1]).sum(), model.inner.weight)[0].square()
    with credo.capture(model) as stats:
        model(x).mean().backward()
    assert stats.examples == M
    assert relative_error(stats.squares[model.inner.weight], truth) < 1e-9


def test_the_order_of_outputs_does_not_matter_to_a_loss():
    """Rows in another order, with their targets, are the same examples."""
    model, x = build(lambda m, x: m.inner(x))
    squares = []
    for order in (torch.arange(M), PERM):
        with credo.capture(model) as stats:
            F.cross_entropy(model(x)[order], torch.arange(M)[order]).backward()
        squares.append(stats.squares[model.inner.weight])
    assert relative_error(squares[1], squares[0]) < 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_group_norms_over_examples_are_refused(groups):
    """On (T, M, d) the examples are channels; a group of several of them, or of places, mixes them."""
    layer, x = nn.Linear(3, 3).double(), torch.randn(4, 2, 3, dtype=torch.float64)
    with pytest.raises(CredoError, match="NativeGroupNormBackward0 normalises"), credo.capture(layer):
        F.group_norm(layer(x).transpose(0, 1), groups).pow(3).mean().backward()


def test_group_norms_of_single_channels_keep_examples_apart():
    layer, x = nn.Linear(3, 3).double(), torch.randn(4, 2, 3, dtype=torch.float64)

    def loss(part):
        return F.group_norm(layer(part).transpose(0, 1), len(part)).pow(3).sum((0, 2)).mean()

    with credo.capture(layer) as stats:
        loss(x).backward()
    truth = sum(torch.autograd.grad(loss(x[i : i + 1]), layer.weight)[0].square() for i in range(4))
    assert torch.allclose(stats.squares[layer.weight], truth, rtol=1e-9)
