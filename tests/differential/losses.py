"""Losses of outputs (M, T, D), element by element, and the ways in which they are reduced to one number."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

Elements = Callable[[Tensor, slice | Tensor], Tensor]  # of the outputs of some examples, which ones: (m, …)


def element_losses(random: Random, m: int, t: int, d: int) -> tuple[str, Elements]:
    """A loss for each element, position or example."""
    values = torch.randn(m, t, d)
    labels, positions = torch.randint(0, t * d, (m,)), torch.randint(0, d, (m, t))
    shares = torch.rand(m, d).softmax(1)
    bits = (torch.rand(m, t, d) < 0.5).to(torch.float64)
    table: dict[str, Elements] = {
        "squares": lambda z, s: F.mse_loss(z, values[s], reduction="none"),
        "huber": lambda z, s: F.huber_loss(z, values[s], reduction="none"),
        "absolute": lambda z, s: (z - values[s]).abs(),
        "classes": lambda z, s: F.cross_entropy(z.flatten(1), labels[s], reduction="none"),
        "classes by hand": lambda z, s: -z.flatten(1).log_softmax(1)[torch.arange(len(z)), labels[s]],
        "classes, gathered": lambda z, s: (
            -z.flatten(1).log_softmax(1).gather(1, labels[s][:, None]).squeeze(1)
        ),
        "smoothed": lambda z, s: F.cross_entropy(
            z.flatten(1), labels[s], reduction="none", label_smoothing=0.2
        ),
        "tokens": lambda z, s: F.cross_entropy(z.transpose(1, 2), positions[s], reduction="none"),
        "merged tokens": lambda z, s: F.cross_entropy(
            z.flatten(0, 1), positions[s].flatten(), reduction="none"
        ).view(len(z), -1),
        "soft classes": lambda z, s: F.cross_entropy(z.mean(1), shares[s], reduction="none"),
        "bits": lambda z, s: F.binary_cross_entropy_with_logits(z, bits[s], reduction="none"),
        "divergence": lambda z, s: F.kl_div(z.mean(1).log_softmax(1), shares[s], reduction="none"),
        "gaussian": lambda z, s: F.gaussian_nll_loss(
            z[..., 0], values[s][..., 0], z[..., -1].exp(), reduction="none"
        ),
        "hinge": lambda z, s: (1 - z.sum((1, 2)) * (bits[s][:, 0, 0] * 2 - 1)).clamp(min=0),
        "cosine": lambda z, s: 1 - F.cosine_similarity(z.flatten(1), values[s].flatten(1)),
    }
    name = random.choice(sorted(table))
    return name, table[name]


@dataclass
class Reduced:
    """A loss Σ weights·elements, over so many examples; None where no number is right, so that it must be refused."""

    loss: Callable[[Tensor], Tensor]
    weights: Tensor | None  # as the elements
    counted: list[int] | None  # examples that a mean counts


def rows(e: Tensor) -> Tensor:
    return e.flatten(1).sum(1) if e.dim() > 1 else e


def means(random: Random, shape: tuple[int, ...]) -> dict[str, Reduced]:
    """What may be declared as a mean."""
    m, size = shape[0], torch.Size(shape).numel()
    everyone, one = list(range(m)), torch.ones(shape)
    some = sorted(random.sample(everyone, random.randint(1, m)))
    mask = torch.zeros(m).index_fill(0, torch.tensor(some), 1.0)
    spread = mask.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    width, k = size // m, len(some)
    picked = [random.randrange(m) for _ in range(random.randint(2, 2 * m))]
    counts = torch.bincount(torch.tensor(picked), minlength=m).view(-1, *[1] * (len(shape) - 1)) * one
    tokens = (torch.rand(shape) < 0.6).double()
    tokens.view(-1)[random.randrange(size)] = 1.0
    with_tokens = (
        tokens.flatten(1).sum(1).nonzero().flatten().tolist()
        if len(shape) > 1
        else tokens.nonzero().flatten().tolist()
    )
    ambiguous = len(with_tokens) < m and tokens.sum() in (m, size)
    keep, shares = torch.tensor(some), torch.rand(m) + 0.1

    def spread_of(values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (len(shape) - 1)).expand(shape)

    return {
        "mean": Reduced(lambda e: e.mean(), one / size, everyone),
        "mean of rows": Reduced(lambda e: rows(e).mean(), one / m, everyone),
        "sum by M": Reduced(lambda e: e.sum() / m, one / m, everyone),
        "sum by its size": Reduced(lambda e: e.sum() / e.numel(), one / size, everyone),
        "sum by a tensor": Reduced(lambda e: e.sum() / torch.tensor(float(m)), one / m, everyone),
        "times 1/M": Reduced(lambda e: e.sum() * (1 / m), one / m, everyone),
        "over columns": Reduced(lambda e: e.mean(0).sum(), one / m, everyone),
        "a factor": Reduced(lambda e: 0.3 * e.mean(), 0.3 * one / size, everyone),
        "a factor on a sum": Reduced(lambda e: 0.3 * (e.sum() / m), 0.3 * one / m, everyone),
        "a factor on a masked mean": Reduced(
            lambda e: 0.3 * ((rows(e) * mask).sum() / mask.sum()), 0.3 * spread / k, some
        ),
        "negative": Reduced(lambda e: -((-e).mean()), one / size, everyone),
        "in a loop": Reduced(lambda e: sum(e[i].sum() for i in range(m)) / m, one / m, everyone),
        "stacked": Reduced(
            lambda e: torch.stack([e[i].mean() for i in range(m)]).mean(), one / size, everyone
        ),
        "some rows": Reduced(lambda e: e[mask.bool()].mean(), spread / (k * width), some),
        "rows by number": Reduced(lambda e: e[keep].mean(), spread / (k * width), some),
        "rows cut off": Reduced(
            lambda e: e[:k].mean(),
            (torch.arange(m) < k).view(-1, *[1] * (len(shape) - 1)) * one / (k * width),
            everyone[:k],
        ),
        "rows with repeats": Reduced(
            lambda e: e[torch.tensor(picked)].mean(), counts / (len(picked) * width), sorted(set(picked))
        ),
        "masked mean": Reduced(lambda e: (rows(e) * mask).sum() / mask.sum(), spread / k, some),
        "masked where": Reduced(lambda e: torch.where(mask > 0, rows(e), 0.0).sum() / k, spread / k, some),
        "masked fill": Reduced(lambda e: rows(e).masked_fill(mask < 1, 0.0).sum() / k, spread / k, some),
        "masked among all": Reduced(lambda e: (rows(e) * mask).mean(), spread / m, everyone),
        "masked select": Reduced(lambda e: rows(e).masked_select(mask > 0).mean(), spread / k, some),
        "masked tokens": Reduced(
            lambda e: (e * tokens).sum() / tokens.sum(),
            None if ambiguous else tokens / tokens.sum(),
            None if ambiguous else with_tokens,
        ),
        "selected tokens": Reduced(lambda e: e[tokens > 0].mean(), tokens / tokens.sum(), with_tokens),
        "weighted mean": Reduced(
            lambda e: (rows(e) * shares).sum() / shares.sum(),
            one * spread_of(shares) / shares.sum(),
            everyone,
        ),
        "weighted mean, some": Reduced(
            lambda e: (rows(e) * shares * mask).sum() / (shares * mask).sum(),
            one * spread_of(shares * mask) / (shares * mask).sum(),
            some,
        ),
        "weights that add up to one": Reduced(
            lambda e: (rows(e) * (shares / shares.sum())).sum(),
            one * spread_of(shares) / shares.sum(),
            everyone,
        ),
        "weights, a product": Reduced(
            lambda e: (shares / shares.sum()) @ rows(e), one * spread_of(shares) / shares.sum(), everyone
        ),
        "halves": Reduced(
            lambda e: rows(e)[: m // 2].sum() / m + rows(e)[m // 2 :].sum() / m, one / m, everyone
        ),
        "two terms": Reduced(lambda e: e.mean() + 0.5 * rows(e).mean(), one / size + 0.5 * one / m, everyone),
        "a weight for each, among all": Reduced(
            lambda e: (rows(e) * (mask + 0.5)).mean(), (spread + 0.5) / m, everyone
        ),
    }


def refused_means(shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is no mean over examples, for M > 1."""
    m = shape[0]
    weights = torch.arange(1, m + 1) * 0.7
    return {
        "sum": lambda e: e.sum(),
        "sum of rows": lambda e: rows(e).sum(),
        "mean times M": lambda e: m * e.mean(),
        "mean of rows times M": lambda e: rows(e).mean() * m,
        "half a sum": lambda e: 0.5 * e.sum() * 2.5,
        "a sum by the wrong number": lambda e: rows(e).sum() / (m + 0.5) * 1.5,
        "sum in a loop": lambda e: sum(e[i].sum() for i in range(m)),
        "sum over columns": lambda e: rows(e).unsqueeze(1).expand(-1, 3).sum(0).mean(),
        "weighted, by another number": lambda e: (rows(e) * weights).sum() / (weights.sum() + 0.37),
        "root": lambda e: (e.square().mean() + 1e-3).sqrt(),
        "log": lambda e: (rows(e).square().mean() + 1.0).log(),
        "largest": lambda e: rows(e).max(),
        "log-sum-exp": lambda e: rows(e).logsumexp(0),
        "variance": lambda e: rows(e).var(),
        "product": lambda e: rows(e).mean() * e.mean(),
        "quotient": lambda e: rows(e).mean() / (e.square().mean() + 1.0),
        "norm": lambda e: e.norm(),
        "median": lambda e: rows(e).median(),
        "divided by too much": lambda e: rows(e).sum() / (3 * m + 0.5),
    }


def sums(random: Random, shape: tuple[int, ...]) -> dict[str, Reduced]:
    """What may be declared as a sum; all examples count."""
    m = shape[0]
    everyone, one = list(range(m)), torch.ones(shape)
    weights = torch.rand(m)
    spread = weights.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    return {
        "sum": Reduced(lambda e: e.sum(), one, everyone),
        "sum of rows": Reduced(lambda e: rows(e).sum(), one, everyone),
        "weighted": Reduced(lambda e: (rows(e) * weights).sum(), spread * 1.0, everyone),
        "mean times M": Reduced(lambda e: rows(e).mean() * m, one, everyone),
        "in a loop": Reduced(lambda e: sum(e[i].sum() for i in range(m)), one, everyone),
        "a factor": Reduced(lambda e: 0.37 * e.sum(), 0.37 * one, everyone),
    }
