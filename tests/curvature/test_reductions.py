"""Over which examples a loss is a mean: read from the graph, or refused. The truth is a loop over own losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import CredoError
from tests.curvature.oracle import relative_error

M, C = 8, 3
X = torch.randn(M, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])
KEPT = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1]).bool()
IGNORED = torch.where(KEPT, Y, -100)
ALL = torch.ones(M).bool()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
SHARES = WEIGHTS[Y] / WEIGHTS[Y].mean()


def own(z: Tensor, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


# Loss of the outputs → who counts, and by how much their own losses differ from the cross-entropy.
MEANS = {
    "plain": (lambda z: F.cross_entropy(z, Y), ALL, 1.0),
    "of own losses": (lambda z: own(z).mean(), ALL, 1.0),
    "a sum divided": (lambda z: own(z).sum() / M, ALL, 1.0),
    "a sum divided by a tensor": (
        lambda z: F.cross_entropy(z, Y, reduction="sum") / torch.tensor(M),
        ALL,
        1.0,
    ),
    "in a loop": (lambda z: sum(own(z[i : i + 1], Y[i : i + 1])[0] for i in range(M)) / M, ALL, 1.0),
    "some in a loop": (lambda z: (own(z)[0] + own(z)[3] + own(z)[7]) / 3, KEPT, 1.0),
    "a factor": (lambda z: 0.3 * F.cross_entropy(z, Y), ALL, 0.3),
    "ignored": (lambda z: F.cross_entropy(z, IGNORED), KEPT, 1.0),
    "ignored, a sum divided": (
        lambda z: F.cross_entropy(z, IGNORED, reduction="sum") / KEPT.sum(),
        KEPT,
        1.0,
    ),
    "ignored, among all": (lambda z: F.cross_entropy(z, IGNORED, reduction="none").mean(), ALL, KEPT),
    "ignored, a factor": (lambda z: F.cross_entropy(z, IGNORED) * 2, KEPT, 2.0),
    "a factor on a sum": (lambda z: 0.5 * (own(z).sum() / M), ALL, 0.5),
    "a factor on a masked mean": (lambda z: 0.5 * (own(z) * KEPT).sum() / KEPT.sum(), KEPT, 0.5),
    "rows by a mask": (lambda z: F.cross_entropy(z[KEPT], Y[KEPT]), KEPT, 1.0),
    "rows by numbers": (lambda z: F.cross_entropy(z[[7, 0, 3]], Y[[7, 0, 3]]), KEPT, 1.0),
    "rows by index_select": (
        lambda z: own(z.index_select(0, torch.tensor([0, 3, 7])), Y[KEPT]).mean(),
        KEPT,
        1.0,
    ),
    "losses by a mask": (lambda z: own(z)[KEPT].mean(), KEPT, 1.0),
    "losses by masked_select": (lambda z: own(z).masked_select(KEPT).mean(), KEPT, 1.0),
    "a masked mean": (lambda z: (own(z) * KEPT).sum() / KEPT.sum(), KEPT, 1.0),
    "a masked mean, where": (lambda z: torch.where(KEPT, own(z), 0.0).sum() / KEPT.sum(), KEPT, 1.0),
    "a masked mean, filled": (lambda z: own(z).masked_fill(~KEPT, 0.0).sum() / KEPT.sum(), KEPT, 1.0),
    "masked, among all": (lambda z: (own(z) * KEPT).mean(), ALL, KEPT),
    "masked, a sum among all": (lambda z: (own(z) * KEPT).sum() / M, ALL, KEPT),
    "weighed, among all": (lambda z: (own(z) * WEIGHTS[Y]).mean(), ALL, WEIGHTS[Y]),
    "the first half": (lambda z: F.cross_entropy(z[:4], Y[:4]), torch.arange(M) < 4, 1.0),
    "halves, each with a mean": (
        lambda z: F.cross_entropy(z[:4], Y[:4]) + F.cross_entropy(z[4:], Y[4:]),
        ALL,
        2.0,
    ),
    "weights that are equal": (
        lambda z: F.cross_entropy(z, Y, weight=torch.full((C,), 7.0).double()),
        ALL,
        1.0,
    ),
    "scaled": (lambda z: (own(z).sum() / M) * 65536.0, ALL, 65536.0),
    # Of a weighted mean, Σ wl/Σ w, the own loss is n times the share, too: wl over the mean weight.
    "class weights": (lambda z: F.cross_entropy(z, Y, weight=WEIGHTS), ALL, SHARES),
    "class weights, scaled": (lambda z: 65536 * F.cross_entropy(z, Y, weight=WEIGHTS), ALL, 65536 * SHARES),
    "class weights, a sum divided": (
        lambda z: F.cross_entropy(z, Y, weight=WEIGHTS, reduction="sum") / WEIGHTS[Y].sum(),
        ALL,
        SHARES,
    ),
    "class weights, own losses": (
        lambda z: F.cross_entropy(z, Y, weight=WEIGHTS, reduction="none").sum() / WEIGHTS[Y].sum(),
        ALL,
        SHARES,
    ),
    "class weights, ignored": (
        lambda z: F.cross_entropy(z, IGNORED, weight=WEIGHTS),
        KEPT,
        WEIGHTS[Y] / WEIGHTS[Y[KEPT]].mean(),
    ),
    "a class of no weight": (
        lambda z: F.cross_entropy(z, Y, weight=torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64)),
        Y > 0,
        1.0,
    ),
    "ignored, own losses": (
        lambda z: F.cross_entropy(z, IGNORED, reduction="none").sum() / KEPT.sum(),
        KEPT,
        1.0,
    ),
    "weights of rows": (lambda z: (own(z) * WEIGHTS[Y]).sum() / WEIGHTS[Y].sum(), ALL, SHARES),
    "weights of rows, of no weight": (
        lambda z: (own(z) * WEIGHTS[Y] * KEPT).sum() / (WEIGHTS[Y] * KEPT).sum(),
        KEPT,
        WEIGHTS[Y] / WEIGHTS[Y[KEPT]].mean(),
    ),
    "weights that add up to one": (lambda z: (own(z) * (SHARES / M)).sum(), ALL, SHARES),
    "weights, a scalar product": (lambda z: (SHARES / M) @ own(z), ALL, SHARES),
    "weights, means of both": (lambda z: (own(z) * WEIGHTS[Y]).mean() / WEIGHTS[Y].mean(), ALL, SHARES),
}


def truth(layer: nn.Module, counted: Tensor, factor) -> tuple[Tensor, int]:
    squares = torch.zeros_like(layer.weight)
    factors = torch.as_tensor(factor, dtype=torch.float64).expand(M)
    for i in counted.nonzero().flatten().tolist():
        loss = own(layer(X[i : i + 1]), Y[i : i + 1]).sum() * factors[i]
        squares += torch.autograd.grad(loss, layer.weight)[0].square()
    return squares, int(counted.sum())


def layer() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, C).double()


@pytest.mark.parametrize(("loss", "counted", "factor"), MEANS.values(), ids=MEANS.keys())
def test_a_mean_is_undone_over_those_it_counts(loss, counted, factor):
    net = layer()
    squares, examples = truth(net, counted, factor)
    with credo.capture(net) as stats:
        loss(net(X)).backward()
    assert stats.examples == examples
    assert relative_error(stats.squares[net.weight], squares) < 1e-12
    net.zero_grad()
    with credo.capture(net) as stats:  # of a graph that is known by now
        loss(net(X)).backward()
    assert relative_error(stats.squares[net.weight], squares) < 1e-12


REFUSED = {
    "a sum": (lambda z: own(z).sum(), "sums the losses of 8 examples.*reduction='sum'"),
    "a sum, of mse": (lambda z: F.mse_loss(z, torch.zeros_like(z), reduction="sum"), "sums the losses"),
    "a sum over examples, a mean over classes": (lambda z: z.square().sum(0).mean(), "sums the losses"),
    "half a sum": (lambda z: 0.5 * own(z).sum(), "divided by 2"),
    "weights, by another number": (lambda z: (own(z) * WEIGHTS[Y]).sum() / 5.3, "divided by 5.3"),
    "weights of both signs": (lambda z: (own(z) * (WEIGHTS[Y] - 1)).sum() / 5.3, "divided by 5.3"),
    "some, by another number": (lambda z: own(z)[KEPT].sum() / 5, "3 examples in a batch of 8.*divided by 5"),
    "divided by too much": (lambda z: own(z).sum() / 20, "divided by more"),
    "a root": (lambda z: z.square().mean().sqrt(), "SqrtBackward0 comes after"),
    "a product of means": (lambda z: z.mean() * own(z).mean(), "MulBackward0 comes after"),
    "the largest": (lambda z: own(z).max(), "MaxBackward1 reduces"),
    "log-sum-exp": (lambda z: own(z).logsumexp(0), "LogsumexpBackward0 reduces"),
    "the variance": (lambda z: own(z).var(), "VarBackward0 comes after"),
}


@pytest.mark.parametrize(("loss", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused(loss, message):
    net = layer()
    with pytest.raises(CredoError, match=message), credo.capture(net):
        loss(net(X)).backward()


@pytest.mark.parametrize(
    "loss",
    [lambda z: own(z).mean(), lambda z: F.cross_entropy(z, Y), lambda z: own(z).sum() / M],
    ids=["mean", "cross-entropy", "divided sum"],
)
def test_a_mean_that_is_declared_a_sum(loss):
    net = layer()
    with pytest.raises(CredoError, match="reduction='sum' is declared"), credo.capture(net, "sum"):
        loss(net(X)).backward()
    assert net.weight.grad is None


SUMS = {
    "plain": (lambda z: own(z).sum(), 1.0),
    "class weights": (lambda z: F.cross_entropy(z, Y, weight=WEIGHTS, reduction="sum"), WEIGHTS[Y]),
    "ignored": (lambda z: F.cross_entropy(z, IGNORED, reduction="sum"), KEPT),
    "a mean, times M": (lambda z: F.cross_entropy(z, Y) * M, 1.0),
    "half": (lambda z: 0.5 * own(z).sum(), 0.5),
}


@pytest.mark.parametrize(("loss", "factor"), SUMS.values(), ids=SUMS.keys())
def test_a_sum_that_is_declared(loss, factor):
    net = layer()
    squares, examples = truth(net, ALL, factor)
    with credo.capture(net, "sum") as stats:
        loss(net(X)).backward()
    assert stats.examples == examples
    assert relative_error(stats.squares[net.weight], squares) < 1e-12


def test_tokens_of_sequences_are_weighed_as_the_batch_does():
    """Sequence i's own loss is k times its share: its tokens over the mean number of tokens of those that have any."""
    net, words = (
        layer(),
        torch.randn(4, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    lengths = [5, 2, 0, 3]
    target = torch.full((4, 5), -100)
    for i, n in enumerate(lengths):
        target[i, :n] = torch.arange(n) % C
    squares = torch.zeros_like(net.weight)
    for i in (0, 1, 3):
        loss = F.cross_entropy(net(words[i]), target[i], reduction="sum") * 3 / 10
        squares += torch.autograd.grad(loss, net.weight)[0].square()
    flat = lambda z: F.cross_entropy(z.flatten(0, 1), target.flatten())  # noqa: E731
    spread = lambda z: F.cross_entropy(z.transpose(1, 2), target)  # noqa: E731
    masked = lambda z: F.cross_entropy(z[target >= 0], target[target >= 0])  # noqa: E731
    summed = lambda z: F.cross_entropy(z.flatten(0, 1), target.flatten(), reduction="sum") / 10  # noqa: E731
    for loss in (flat, spread, masked, summed):
        with credo.capture(net) as stats:
            loss(net(words)).backward()
        assert stats.examples == 3
        assert relative_error(stats.squares[net.weight], squares) < 1e-12
        net.zero_grad()


def test_label_smoothing_with_ignored_examples():
    net, squares = layer(), torch.zeros(C, 4, dtype=torch.float64)
    for i in KEPT.nonzero().flatten().tolist():
        loss = F.cross_entropy(net(X[i : i + 1]), Y[i : i + 1], label_smoothing=0.2)
        squares += torch.autograd.grad(loss, net.weight)[0].square()
    with credo.capture(net) as stats:
        F.cross_entropy(net(X), IGNORED, label_smoothing=0.2).backward()
    assert stats.examples == 3
    assert relative_error(stats.squares[net.weight], squares) < 1e-12


def test_micro_batches_must_be_shares():
    net = layer()
    with credo.capture(net):
        F.cross_entropy(net(X[:4]), Y[:4]).backward()
        with pytest.raises(CredoError, match="two backward passes in one block"):
            F.cross_entropy(net(X[4:]), Y[4:]).backward()
    squares, _ = truth(net, ALL, 1.0)
    with credo.capture(net) as stats:
        for part in (slice(0, 2), slice(2, 8)):
            (F.cross_entropy(net(X[part]), Y[part], reduction="sum") / M).backward()
    assert stats.examples == M
    assert relative_error(stats.squares[net.weight], squares) < 1e-12


@pytest.mark.parametrize(
    "loss",
    [lambda z, y, k: F.cross_entropy(z, y), lambda z, y, k: (own(z, y.clamp(min=0)) * k).sum() / k.sum()],
)
def test_micro_batches_with_masks(loss):
    net, squares = layer(), truth(layer(), KEPT, 0.5 * 3 / torch.tensor([1, 1, 1, 2, 2, 2, 2, 2]))[0]
    with credo.capture(net) as stats:  # of the first micro-batch one counts, of the second two
        for part in (slice(0, 3), slice(3, 8)):
            (loss(net(X[part]), IGNORED[part], KEPT[part]) / 2).backward()
    assert stats.examples == 3
    assert relative_error(stats.squares[net.weight], squares) < 1e-12


@pytest.mark.parametrize("method", ["VOGN", "OGN"])
def test_optimisers_see_ignored_examples_as_if_they_were_not_there(method):
    """The mean loss over some examples of a batch is that of the batch of these examples: so is the step."""
    models = []
    for x, y in ((X, IGNORED), (X[KEPT], Y[KEPT])):
        net = layer()
        optimizer = getattr(credo, method)(net, lr=0.1, data_size=100, seed=3)
        for _ in range(2):
            optimizer.step(lambda n=net, x=x, y=y: F.cross_entropy(n(x), y))
        models.append(net.weight.detach())
    torch.testing.assert_close(*models, rtol=1e-10, atol=1e-12)


def test_kronecker_factors_of_some_examples_are_refused():
    net = layer()
    with pytest.raises(CredoError, match="3 losses for 8 examples"):
        credo.kronecker_factors(net, lambda: F.cross_entropy(net(X), IGNORED))
