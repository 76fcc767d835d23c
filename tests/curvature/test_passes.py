"""Several passes of a model under one backward pass: the same examples, others, or not to be told."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import UnsupportedOperation

M = 6
G = torch.Generator().manual_seed(5)
A, B = (torch.randn(M, 4, dtype=torch.float64, generator=G) for _ in range(2))
Y = torch.tensor([0, 1, 2, 0, 1, 1])
ONE = torch.randn(1, 2, dtype=torch.float64, generator=G)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def own(z, y=Y):
    return F.cross_entropy(z, y, reduction="none")


ce = F.cross_entropy
# What could be a mean over the rows of all passes, or over as many rows that each pass sees in its own way.
UNCLEAR = {
    "the mean of two halves": lambda m: (ce(m(A[:3]), Y[:3]) + ce(m(A[3:]), Y[3:])) / 2,
    "stacked": lambda m: torch.stack([ce(m(A[:3]), Y[:3]), ce(m(A[3:]), Y[3:])]).mean(),
    "losses behind each other": lambda m: torch.cat([own(m(A[:3]), Y[:3]), own(m(A[3:]), Y[3:])]).mean(),
    "outputs behind each other": lambda m: ce(torch.cat([m(A[:3]), m(A[3:])]), Y),
    "sums by the number of all": lambda m: (own(m(A[:3]), Y[:3]).sum() + own(m(A[3:]), Y[3:]).sum()) / M,
    "one by one": lambda m: sum(ce(m(A[i : i + 1]), Y[i : i + 1]) for i in range(M)) / M,
    "one by one, stacked": lambda m: torch.stack(
        [ce(m(x[None]), y[None]) for x, y in zip(A, Y, strict=True)]
    ).mean(),
    "one by one, outputs": lambda m: ce(torch.cat([m(x[None]) for x in A]), Y),
    "weighed halves": lambda m: 0.3 * ce(m(A), Y) + 0.7 * ce(m(B), Y),
}


@pytest.mark.parametrize("loss", UNCLEAR.values(), ids=UNCLEAR)
@pytest.mark.parametrize("twice", [False, True])
def test_passes_that_may_have_other_examples_are_refused(loss, twice):
    model = net()
    for _ in range(1 + twice):  # the second time the graph is known
        with (
            pytest.raises(UnsupportedOperation, match=r"passes through the model.*torch.cat.*examples=M"),
            credo.capture(model),
        ):
            loss(model).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("loss", ["halves", "one by one"])
def test_sums_of_passes_are_refused(loss):
    model = net()
    parts = [slice(0, 3), slice(3, 6)] if loss == "halves" else [slice(i, i + 1) for i in range(M)]
    with pytest.raises(UnsupportedOperation, match="passes through the model"), credo.capture(model, "sum"):
        sum(own(model(A[part]), Y[part]).sum() for part in parts).backward()


# The loss, and example i's own: that of row i in both passes.
SAME = {
    "rows that meet": (
        lambda m: (own(m(A)) + own(m(B))).mean(),
        lambda m, i: own(m(A[i]), Y[i]) + own(m(B[i]), Y[i]),
    ),
    "a sum of means": (
        lambda m: ce(m(A), Y) + ce(m(B), Y),
        lambda m, i: own(m(A[i]), Y[i]) + own(m(B[i]), Y[i]),
    ),
    "a mean and a term beside it": (
        lambda m: ce(m(A), Y) + 0.5 * m(B).square().mean(),
        lambda m, i: own(m(A[i]), Y[i]) + 0.5 * m(B[i]).square().mean(),
    ),
    "a critic": (lambda m: m(A).mean() - m(B).mean(), lambda m, i: m(A[i]).mean() - m(B[i]).mean()),
    "stacked outputs": (
        lambda m: ce(torch.stack([m(A), m(B)]).mean(0), Y),
        lambda m, i: own((m(A[i]) + m(B[i])) / 2, Y[i]),
    ),
    "outputs side by side": (
        lambda m: torch.cat([m(A), m(B)], 1).square().sum(1).mean(),
        lambda m, i: m(A[i]).square().sum() + m(B[i]).square().sum(),
    ),
}


def squares(model, losses):
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(loss, parameters) for loss in losses]
    return [sum(row[k].square() for row in rows) for k in range(len(parameters))]


@pytest.mark.parametrize(("loss", "one"), SAME.values(), ids=SAME)
def test_rows_of_passes_that_are_the_same_examples(loss, one):
    model = net()
    truth = squares(model, [one(model, i).sum() for i in range(M)])
    with credo.capture(model) as stats:
        loss(model).backward()
    assert stats.examples == M
    for p, wanted in zip(model.parameters(), truth, strict=True):
        assert torch.allclose(stats.squares[p], wanted, rtol=1e-10, atol=1e-14)


def test_the_same_examples_by_declaration():
    model = net()
    truth = squares(model, [(own(model(A[i]), Y[i]) + own(model(B[i]), Y[i])) / 2 for i in range(M)])
    with credo.capture(model, examples=M) as stats:
        ((ce(model(A), Y) + ce(model(B), Y)) / 2).backward()
    for p, wanted in zip(model.parameters(), truth, strict=True):
        assert torch.allclose(stats.squares[p], wanted, rtol=1e-10, atol=1e-14)


def test_models_beside_each_other_share_no_parameter():
    models = nn.ModuleList([net(), nn.Linear(4, 3).double()])
    with credo.capture(models) as stats:
        ((ce(models[0](A), Y) + ce(models[1](A), Y)) / 2).backward()
    assert stats.examples == M


# One row that was made from no example, for all examples.
FOR_ALL = {
    "a weight": lambda layer: A @ layer(ONE).view(4, 3),
    "a weight, its row": lambda layer: A @ layer(ONE)[0].view(4, 3),
    "a weight, by einsum": lambda layer: torch.einsum("bi,io->bo", A, layer(ONE).view(4, 3)),
    "a weight of a convolution": lambda layer: F.conv1d(A[:, None], layer(ONE).view(4, 1, 3)),
    "a weight of a batch of sequences": lambda layer: A.view(2, 3, 4) @ layer(ONE).view(4, 3),
    "added": lambda layer: layer(ONE) + torch.ones(M, 12).double(),
    "expanded": lambda layer: layer(ONE).expand(M, -1) * torch.ones(M, 12).double(),
    "repeated": lambda layer: layer(ONE).repeat(M, 1) * torch.ones(M, 12).double(),
    "compared": lambda layer: F.mse_loss(layer(ONE), torch.ones(M, 12).double(), reduction="none"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("outputs", FOR_ALL.values(), ids=FOR_ALL)
def test_one_row_for_all_examples_is_not_the_only_example(outputs):
    torch.manual_seed(0)
    layer = nn.Linear(2, 12).double()
    with pytest.raises(UnsupportedOperation, match="register_buffer"), credo.capture(layer):
        outputs(layer).square().mean().backward()


def test_one_row_is_an_example_otherwise():
    """A last batch of one: recurrent uses, attention, noise in front, positions behind."""
    torch.manual_seed(0)
    x, noise = torch.randn(1, 5, 4).double(), torch.randn(7, 1, 4).double()
    for model, loss in [
        (nn.LSTM(4, 4, batch_first=True), lambda m: m(x)[0].square().mean()),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda m: m(x).square().mean()),
        (nn.Linear(4, 4), lambda m: (m(x[:, 0])[None] + noise).square().mean()),
        (nn.Linear(4, 4), lambda m: (m(x[:, 0]).unsqueeze(1) + noise[:, 0]).square().mean()),
        (nn.Linear(4, 4), lambda m: (x[:, 0] + m(m(x[:, 0]))).square().mean()),
    ]:
        model.double()
        (truth,) = torch.autograd.grad(loss(model), [next(model.parameters())])
        with credo.capture(model) as stats:
            loss(model).backward()
        assert stats.examples == 1
        assert torch.allclose(stats.squares[next(model.parameters())], truth.square(), rtol=1e-10)


FOREIGN = {
    "vmap": lambda m: torch.vmap(m)(A).square().mean(),
    "jvp": lambda m: torch.func.jvp(m, (A,), (B,))[1].square().mean(),
    "nested": lambda m: m(torch.nested.nested_tensor([A[:2], A[2:5]])).to_padded_tensor(0.0).square().mean(),
}


@pytest.mark.parametrize("loss", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_ways_to_call_a_model_that_hide_its_rows_are_refused(loss):
    model = net()
    with pytest.raises(UnsupportedOperation, match=r"single examples|nested tensor"), credo.capture(model):
        loss(model).backward()


def test_forward_mode_is_refused():
    import torch.autograd.forward_ad as forward_mode

    model = net()
    with (
        forward_mode.dual_level(),
        pytest.raises(UnsupportedOperation, match="forward mode"),
        credo.capture(model),
    ):
        model(forward_mode.make_dual(A, B)).square().mean().backward()


# Rows of a batch that go through parameters of their own: experts, or a head for each domain


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()

    def parts(self, x: Tensor, of: Tensor) -> list[Tensor]:
        return [head(x[of == k]) for k, head in enumerate(self.heads)]


def written(parts: list[Tensor], of: Tensor) -> Tensor:
    out = torch.zeros(len(of), 3, dtype=torch.float64)
    for k, part in enumerate(parts):
        out[of == k] = part
    return out


def scattered(parts: list[Tensor], of: Tensor) -> Tensor:
    out = torch.zeros(len(of), 3, dtype=torch.float64)
    for k, part in enumerate(parts):
        out = out.masked_scatter((of == k)[:, None].expand(-1, 3), part)
    return out


def labels(of: Tensor) -> list[Tensor]:
    return [torch.arange(int((of == k).sum())) % 3 for k in (0, 1)]


PUT_TOGETHER = {
    "written": lambda z, of: F.cross_entropy(written(z, of), torch.arange(len(of)) % 3),
    "scattered": lambda z, of: F.cross_entropy(scattered(z, of), torch.arange(len(of)) % 3),
    "joined": lambda z, of: F.cross_entropy(torch.cat(z), torch.cat(labels(of))),
    "losses": lambda z, of: torch.cat(
        [F.cross_entropy(o, y, reduction="none") for o, y in zip(z, labels(of), strict=True)]
    ).mean(),
}


@pytest.mark.parametrize("loss", PUT_TOGETHER.values(), ids=PUT_TOGETHER)
def test_rows_that_are_sent_to_different_parameters(loss):
    """Three rows each: they are six examples, where three would be counted."""
    of = torch.tensor([0, 1, 0, 1, 1, 0])
    net, x = Heads(), torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedOperation, match="nothing in common but parameters"), credo.capture(net):
        loss(net.parts(x, of), of).backward()


@pytest.mark.parametrize(
    "loss", [PUT_TOGETHER[name] for name in ("written", "scattered", "joined", "losses")]
)
def test_one_row_each(loss):
    of = torch.tensor([0, 1])
    net, x = Heads(), torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedOperation, match="nothing in common but parameters"), credo.capture(net):
        loss(net.parts(x, of), of).backward()


PAIRS = {
    "added": lambda a, b: (a + b).square().mean(),
    "side by side": lambda a, b: torch.cat([a, b], 1).square().mean(),
    "written by columns": lambda a, b: columns(a, b).square().mean(),
    "a loss each": lambda a, b: a.square().mean() + (b - 1).square().mean(),
    "losses of rows": lambda a, b: 0.5 * (a.square() + (b - 1).square()).mean(),
}


def columns(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(len(a), 6, dtype=torch.float64)
    out[:, :3], out[:, 3:] = a, b
    return out


@pytest.mark.parametrize("loss", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("examples", [5, 1])
def test_two_networks_of_the_same_examples(loss, examples):
    """Towers, twin critics: row i of both is example i."""
    net, x = Heads(), torch.randn(examples, 4, dtype=torch.float64)
    a, b = net.heads
    truth = {p: torch.zeros_like(p) for p in net.parameters()}
    for row in x.split(1):
        grads = torch.autograd.grad(loss(a(row), b(row)), list(truth))
        for p, grad in zip(truth, grads, strict=True):
            truth[p] += grad.square()
    with credo.capture(net) as stats:
        loss(a(x), b(x)).backward()
    assert stats.examples == examples
    for p, squares in truth.items():
        torch.testing.assert_close(stats.squares[p], squares, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_single_examples_at_several_samples_at_once(reduction):
    """A loop over single examples is refused under vmap too."""
    model = net()
    optimizer = credo.VOGN(model, lr=0.1, data_size=10, mc_samples=2, vectorized=True, reduction=reduction)
    with pytest.raises(UnsupportedOperation, match="nothing in common but parameters"):
        optimizer.step(
            lambda: (
                sum(F.cross_entropy(model(A[i : i + 1]), Y[i : i + 1]) for i in range(2))
                / (2 if reduction == "mean" else 1)
            )
        )
