"""Weighted cross-entropies as torch builds them from several operations; the truth is a loop over examples."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from tests.curvature.oracle import relative_error

M, C, T = 6, 3, 4
G = torch.Generator().manual_seed(3)
X = torch.randn(M, 4, dtype=torch.float64, generator=G)
LONG = torch.randn(M, T, 4, dtype=torch.float64, generator=G)
Y = torch.tensor([0, 1, 2, 0, 1, 1])
TOKENS = torch.randint(0, C, (M, T), generator=G).index_fill(1, torch.tensor([1]), -100)
SOFT = torch.rand(M, C, dtype=torch.float64, generator=G).softmax(1)
W = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
OF_TOKENS = torch.where(TOKENS < 0, 0.0, W[TOKENS.clamp(min=0)]).sum()


def tokens(z: Tensor, y: Tensor, **options) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y, weight=W, **options)


# (batch, loss of its outputs, example i's share of it, from its own outputs)
LOSSES = {
    "smoothed": (
        X,
        lambda z: F.cross_entropy(z, Y, weight=W, label_smoothing=0.1),
        lambda z, i: F.cross_entropy(z, Y[i], weight=W, label_smoothing=0.1, reduction="sum") / W[Y].sum(),
    ),
    "soft targets": (
        X,
        lambda z: F.cross_entropy(z, SOFT, weight=W),
        lambda z, i: F.cross_entropy(z, SOFT[i], weight=W, reduction="sum") / M,
    ),
    "soft targets, smoothed": (
        X,
        lambda z: F.cross_entropy(z, SOFT, label_smoothing=0.2),
        lambda z, i: F.cross_entropy(z, SOFT[i], label_smoothing=0.2, reduction="sum") / M,
    ),
    "tokens": (
        LONG,
        lambda z: tokens(z, TOKENS),
        lambda z, i: tokens(z, TOKENS[i], reduction="sum") / OF_TOKENS,
    ),
    "tokens, smoothed": (
        LONG,
        lambda z: tokens(z, TOKENS, label_smoothing=0.1),
        lambda z, i: tokens(z, TOKENS[i], label_smoothing=0.1, reduction="sum") / OF_TOKENS,
    ),
    "merged tokens": (
        LONG,
        lambda z: F.cross_entropy(z.reshape(-1, C), TOKENS.flatten(), weight=W),
        lambda z, i: tokens(z, TOKENS[i], reduction="sum") / OF_TOKENS,
    ),
    "an auxiliary term": (
        X,
        lambda z: F.cross_entropy(z, Y, weight=W) + 0.1 * z.square().mean(),
        lambda z, i: (
            F.cross_entropy(z, Y[i], weight=W, reduction="sum") / W[Y].sum() + 0.1 * z.square().mean() / M
        ),
    ),
}


@pytest.mark.parametrize(("x", "loss", "share"), LOSSES.values(), ids=LOSSES)
def test_squares_of_weighted_means(x, loss, share):
    torch.manual_seed(0)
    net = nn.Linear(4, C).double()
    truth = torch.zeros_like(net.weight)
    for i in range(M):
        own = M * share(net(x[i : i + 1]), slice(i, i + 1))
        truth += torch.autograd.grad(own, net.weight)[0].square()
    with credo.capture(net) as stats:
        loss(net(x)).backward()
    assert stats.examples == M
    assert relative_error(stats.squares[net.weight], truth) < 1e-12


SOME = Y.index_fill(0, torch.tensor([1, 4]), -100)
WITH_NONE = torch.tensor([0.0, 2.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("targets", "weight"), [(SOME, W), (Y, WITH_NONE), (SOME, WITH_NONE)], ids=["some", "no weight", "both"]
)
def test_smoothed_weights_of_some_examples(targets, weight):
    """Smoothing divides by the weights of the targets too, and counts examples whose own class has none."""
    torch.manual_seed(0)
    net = nn.Linear(4, C).double()
    counted = [i for i in range(M) if targets[i] >= 0]
    truth = torch.zeros_like(net.weight)
    for i in counted:
        own = F.cross_entropy(
            net(X[i : i + 1]), targets[i : i + 1], weight, label_smoothing=0.1, reduction="sum"
        )
        own = len(counted) * own / weight[targets[counted]].sum()
        truth += torch.autograd.grad(own, net.weight)[0].square()
    with credo.capture(net) as stats:
        F.cross_entropy(net(X), targets, weight, label_smoothing=0.1).backward()
    assert stats.examples == len(counted)
    assert relative_error(stats.squares[net.weight], truth) < 1e-12


@pytest.mark.parametrize("method", ["VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC"])
def test_every_method_takes_class_weights(method):
    """One step is that of own losses whose weights have the mean one."""

    def taught(loss):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)).double()
        options = {} if method == "IVON" else {"damping": 0.1}
        optimizer = getattr(credo, method)(net, lr=0.05, data_size=60, seed=1, **options)
        for _ in range(2):
            optimizer.step(lambda: loss(net(X)))
        return net

    shares = W[Y] / W[Y].mean()
    net = taught(lambda z: F.cross_entropy(z, Y, weight=W))
    twin = taught(lambda z: (shares * F.cross_entropy(z, Y, reduction="none")).mean())
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
