"""Losses as torch offers them and as users write them, whole; and what each example's own part of them is."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.losses import Elements, Reduced

Whole = Callable[[nn.Module, Tensor], Tensor]  # of a model and its outputs


@dataclass
class Direct:
    """A loss of all outputs, and the same as Σ weights·elements; without weights it must be refused."""

    whole: Whole
    elements: Elements
    reduced: Reduced


class Targets(NamedTuple):
    """Of M examples with outputs (M, T, D)."""

    values: Tensor
    labels: Tensor  # among T·D
    others: Tensor
    positions: Tensor  # (M, T), among D
    bits: Tensor
    shares: Tensor  # (M, D), each a distribution
    signs: Tensor  # (M,)
    weights: Tensor  # of T·D classes
    noise: Tensor
    advantages: Tensor  # (M,)
    some: Tensor  # (M,), bool, at least one


def draw_targets(random: Random, m: int, t: int, d: int) -> Targets:
    some = torch.rand(m) < 0.6
    some[random.randrange(m)] = True
    return Targets(
        torch.randn(m, t, d),
        torch.randint(0, t * d, (m,)),
        torch.randint(0, t * d, (m,)),
        torch.randint(0, d, (m, t)),
        (torch.rand(m, t, d) < 0.5).double(),
        torch.rand(m, d).softmax(1),
        (torch.rand(m) < 0.5).double() * 2 - 1,
        torch.rand(t * d) + 0.1,
        torch.randn(m, t, d),
        torch.randn(m),
        some,
    )


def direct_losses(random: Random, m: int, t: int, d: int) -> dict[str, Direct]:
    """Means that torch takes itself, and sums of several of them."""
    y = draw_targets(random, m, t, d)
    every = list(range(m))
    one = Reduced(lambda e: e, torch.full((m,), 1 / m), every)  # a loss of each example, and their mean
    teacher, temperature = torch.randn(m, t * d), random.choice((2.0, float(m), 3.0))
    flat = lambda z: z.flatten(1)  # noqa: E731

    def by_rows(loss: Callable[[Tensor, slice | Tensor], Tensor]) -> Direct:
        """A loss that is a mean over whatever it is given; an example's own is that of a batch of one."""
        alone = lambda z, s: torch.stack([loss(z[i : i + 1], s) for i in range(len(z))])  # noqa: E731
        return Direct(lambda _, z: loss(z, slice(None)), alone, one)

    def entropy(z: Tensor, s: slice | Tensor) -> Tensor:
        return F.cross_entropy(flat(z), y.labels[s])

    def over_some(weights: Tensor, kept: Tensor, loss: Whole, elements: Elements) -> Direct:
        counted = kept.nonzero().flatten().tolist()
        return Direct(loss, elements, Reduced(lambda e: e, weights * kept, counted))

    own_entropy: Elements = lambda z, s: F.cross_entropy(flat(z), y.labels[s], reduction="none")  # noqa: E731
    ignored = torch.where(y.some, y.labels, -100)
    of_class = y.weights[y.labels]
    tokens = torch.where(torch.rand(m, t) < 0.6, y.positions, -100)
    tokens[0, 0] = 0
    with_tokens = (tokens >= 0).any(1)

    def own_tokens(z: Tensor, s: slice | Tensor) -> Tensor:
        lost = F.cross_entropy(z.transpose(1, 2), tokens[s], ignore_index=-100, reduction="none")
        return lost.sum(1)

    def smoothed(z: Tensor, s: slice | Tensor) -> Tensor:
        return F.cross_entropy(flat(z), y.labels[s], weight=y.weights, label_smoothing=0.2, reduction="none")

    def distilled(z: Tensor, s: slice | Tensor) -> Tensor:
        student = F.log_softmax(flat(z) / temperature, 1)
        kept = F.softmax(teacher[s] / temperature, 1)
        return F.kl_div(student, kept, reduction="batchmean") * temperature**2

    def autoencoder(z: Tensor, s: slice | Tensor) -> Tensor:
        mean, spread = z.mean(1), z[:, 0].clamp(-3, 3)
        code = mean + (0.5 * spread).exp() * y.noise[s][:, 0]
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        return (code - y.values[s][:, 0]).square().sum() / len(z) + kl.mean()

    def policy(z: Tensor, s: slice | Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=flat(z), validate_args=False)
        return -(chosen.log_prob(y.labels[s]) * y.advantages[s]).mean() - 0.01 * chosen.entropy().mean()

    def focal(z: Tensor, s: slice | Tensor) -> Tensor:
        lost = F.cross_entropy(flat(z), y.labels[s], reduction="none")
        return ((1 - torch.exp(-lost)) ** 2 * lost).mean()

    def smoothed_by_hand(z: Tensor, s: slice | Tensor) -> Tensor:
        logs = flat(z).log_softmax(1)
        target = torch.full_like(logs, 0.1).scatter_(1, y.labels[s][:, None], 0.9)
        return torch.mean(torch.sum(-target * logs, dim=-1))

    def mixture(z: Tensor, s: slice | Tensor) -> Tensor:
        logs = z.mean(1).log_softmax(1) - 0.5 * (z[:, 0] - y.values[s][:, 0, :1]).square()
        return -torch.logsumexp(logs, 1).mean()

    def blend(z: Tensor, s: slice | Tensor) -> Tensor:
        a, b = F.cross_entropy(flat(z), y.labels[s]), F.cross_entropy(flat(z), y.others[s])
        return 0.3 * a + (1 - 0.3) * b

    def pinball(z: Tensor, s: slice | Tensor) -> Tensor:
        error = y.values[s] - z
        return torch.max(0.9 * error, (0.9 - 1) * error).mean()

    def triplet(z: Tensor, s: slice | Tensor) -> Tensor:
        return F.triplet_margin_loss(flat(z), flat(y.values[s]), flat(y.noise[s]), margin=3.0)

    def sequences(z: Tensor, s: slice | Tensor) -> Tensor:
        logs = z.log_softmax(2).transpose(0, 1)
        rows = z.shape[0]
        lengths = torch.full((rows,), t), torch.full((rows,), 1)
        return F.ctc_loss(logs, (y.positions[s][:, :1] % (d - 1)) + 1, *lengths)

    names: dict[str, Direct] = {
        "entropy": by_rows(entropy),
        "negative likelihood": by_rows(lambda z, s: F.nll_loss(flat(z).log_softmax(1), y.labels[s])),
        "smoothing": by_rows(lambda z, s: F.cross_entropy(flat(z), y.labels[s], label_smoothing=0.2)),
        "probabilities": by_rows(lambda z, s: F.cross_entropy(z.mean(1), y.shares[s])),
        "mean squares": by_rows(lambda z, s: F.mse_loss(z, y.values[s])),
        "smooth l1": by_rows(lambda z, s: F.smooth_l1_loss(z, y.values[s], beta=0.5)),
        "huber mean": by_rows(lambda z, s: F.huber_loss(z, y.values[s])),
        "l1": by_rows(lambda z, s: F.l1_loss(z, y.values[s])),
        "logits with weights": by_rows(
            lambda z, s: F.binary_cross_entropy_with_logits(z, y.bits[s], pos_weight=y.weights[:d])
        ),
        "bits of probabilities": by_rows(lambda z, s: F.binary_cross_entropy(z.sigmoid(), y.bits[s])),
        "batch mean of a divergence": by_rows(
            lambda z, s: F.kl_div(z.mean(1).log_softmax(1), y.shares[s], reduction="batchmean")
        ),
        "divergence of logs": by_rows(
            lambda z, s: F.kl_div(
                z.mean(1).log_softmax(1), y.shares[s].log(), reduction="batchmean", log_target=True
            )
        ),
        "gaussian mean": by_rows(
            lambda z, s: F.gaussian_nll_loss(z[..., 0], y.values[s][..., 0], F.softplus(z[..., -1]) + 0.01)
        ),
        "poisson": by_rows(lambda z, s: F.poisson_nll_loss(z.clamp(max=3), y.bits[s])),
        "margins": by_rows(lambda z, s: F.multi_margin_loss(flat(z), y.labels[s])),
        "soft margins": by_rows(lambda z, s: F.soft_margin_loss(z, y.bits[s] * 2 - 1)),
        "soft margins of labels": by_rows(
            lambda z, s: F.multilabel_soft_margin_loss(flat(z), flat(y.bits[s]))
        ),
        "hinge of embeddings": by_rows(lambda z, s: F.hinge_embedding_loss(z, y.bits[s] * 2 - 1)),
        "cosine of embeddings": by_rows(
            lambda z, s: F.cosine_embedding_loss(flat(z), flat(y.values[s]), y.signs[s], margin=0.2)
        ),
        "ranking": by_rows(
            lambda z, s: F.margin_ranking_loss(z.mean((1, 2)), y.values[s].mean((1, 2)), y.signs[s], 0.3)
        ),
        "triplet": by_rows(triplet),
        "sequences": by_rows(sequences),
        "policy": by_rows(policy),
        "focal": by_rows(focal),
        "smoothing by hand": by_rows(smoothed_by_hand),
        "mixture": by_rows(mixture),
        "blend": by_rows(blend),
        "pinball": by_rows(pinball),
        "autoencoder": by_rows(autoencoder),
        "distillation": by_rows(distilled),
        "distillation and labels": by_rows(lambda z, s: 0.7 * distilled(z, s) + 0.3 * entropy(z, s)),
        "two tasks": by_rows(lambda z, s: entropy(z, s) + 0.1 * F.mse_loss(z, y.values[s])),
        "two tasks, averaged": by_rows(lambda z, s: (entropy(z, s) + F.mse_loss(z, y.values[s])) / 2),
        "two tasks, stacked": by_rows(
            lambda z, s: torch.stack([entropy(z, s), F.mse_loss(z, y.values[s])]).mean()
        ),
        "a term for each position": by_rows(
            lambda z, s: sum(F.mse_loss(z[:, k], y.values[s][:, k]) for k in range(t)) / t  # type: ignore[return-value]
        ),
        "as many times as there are examples, a constant": by_rows(lambda z, s: float(m) * entropy(z, s)),
        "sparse activations": by_rows(lambda z, s: entropy(z, s) + 0.01 * z.abs().sum((1, 2)).mean()),
        "some labels": over_some(
            torch.full((m,), 1 / int(y.some.sum())),
            y.some,
            lambda _, z: F.cross_entropy(flat(z), ignored),
            own_entropy,
        ),
        "weights of classes": over_some(
            of_class / of_class.sum(),
            torch.ones(m, dtype=torch.bool),
            lambda _, z: F.cross_entropy(flat(z), y.labels, weight=y.weights),
            own_entropy,
        ),
        "weights of classes, smoothed": over_some(
            torch.ones(m) / of_class.sum(),
            torch.ones(m, dtype=torch.bool),
            lambda _, z: F.cross_entropy(flat(z), y.labels, weight=y.weights, label_smoothing=0.2),
            smoothed,
        ),
        "some tokens": over_some(
            torch.ones(m) / (tokens >= 0).sum(),
            with_tokens,
            lambda _, z: F.cross_entropy(z.flatten(0, 1), tokens.flatten()),
            own_tokens,
        ),
        "some tokens, chosen before": over_some(
            torch.ones(m) / (tokens >= 0).sum(),
            with_tokens,
            lambda _, z: F.cross_entropy(z[tokens >= 0], tokens[tokens >= 0]),
            own_tokens,
        ),
    }
    return names


def refused_directly(random: Random, m: int, t: int, d: int) -> dict[str, Whole]:
    """Losses in which a parameter (`weigh`, one number for each output) meets what all examples have made."""
    values = torch.randn(m, t, d)

    def of_tasks(z: Tensor) -> Tensor:
        return torch.stack([(z[..., k] - values[..., k]).square().mean() for k in range(d)])

    weighed: dict[str, Whole] = {
        "learned variances of tasks": lambda model, z: (
            torch.exp(-model.weigh) * of_tasks(z) + model.weigh
        ).mean(),
        "learned weights of tasks": lambda model, z: (model.weigh * of_tasks(z)).sum(),
        "learned weights of columns": lambda model, z: (
            model.weigh * (z - values).square().mean((0, 1))
        ).mean(),
        "a learned weight of a mean": lambda model, z: (
            torch.exp(-model.weigh[0]) * F.mse_loss(z, values) + model.weigh[0]
        ),
        "a learned product of statistics": lambda model, z: F.linear(z.square().mean((0, 1)), model.weigh),
    }
    return weighed
