"""What programs are made of: maps of (M, T, D) to the same that treat every example by itself, and some that do not.

Each entry takes a source of choices and the shape, and returns a module.
"""

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint


class Map(nn.Module):
    """A function of parts and rows."""

    def __init__(self, function: Callable[..., Tensor], **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    """A function of one's own on activations."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


class Symmetric(nn.Module):
    """A weight that is its own transpose."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape), requires_grad=False)


def with_magnitude(m: Map, x: Tensor) -> Tensor:
    weight = m.w + m.b @ m.a
    return F.linear(x, m.p * weight / weight.norm(dim=1, keepdim=True))


def quantised(m: Map, x: Tensor) -> Tensor:
    step = m.p.detach().abs().max() / 7
    return F.linear(x, m.p + ((m.p / step).round() * step - m.p).detach())


def with_start(m: Map, x: Tensor) -> Tensor:
    state = m.p.repeat(len(x), 1)
    for k in range(x.shape[1]):
        state = torch.tanh(m.a(x[:, k]) + m.b(state))
    return x + state.unsqueeze(1)


def merged(m: Map, x: Tensor) -> Tensor:
    return m.inner(x.reshape(-1, x.shape[-1])).view(x.shape)


def unrolled(m: Map, x: Tensor) -> Tensor:
    state = torch.zeros(len(x), x.shape[2], dtype=x.dtype)
    states = []
    for k in range(x.shape[1]):
        state = m.cell(x[:, k], state)
        states.append(state)
    return torch.stack(states, 1)


def attention(m: Map, x: Tensor) -> Tensor:
    q, k, v = m.q(x), m.k(x), m.v(x)
    return torch.softmax(q @ k.transpose(1, 2), -1) @ v


def filled(m: Map, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in range(x.shape[-1]):
        out[..., k] = x[..., -1 - k] * (k + 1)
    return out


def sequence_layers(t: int, d: int) -> dict[str, Callable[[], nn.Module]]:
    """With parameters, on (M, T, D)."""
    return {
        "linear": lambda: nn.Linear(d, d),
        "linear, no bias": lambda: nn.Linear(d, d, bias=False),
        "merged linear": lambda: Map(merged, inner=nn.Linear(d, d)),
        "linear twice": lambda: Map(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(d, d)),
        "residual": lambda: Map(lambda m, x: x + m.a(x).relu(), a=nn.Linear(d, d)),
        "convolution": lambda: Map(
            lambda m, x: m.a(x.transpose(1, 2)).transpose(1, 2), a=nn.Conv1d(d, d, 3, padding=1)
        ),
        "depthwise": lambda: Map(lambda m, x: m.a(x.mT).mT, a=nn.Conv1d(d, d, 3, padding=1, groups=d)),
        "over positions": lambda: nn.Conv1d(t, t, 1),
        "layer norm": lambda: nn.LayerNorm(d),
        "group norm": lambda: nn.GroupNorm(1, t),
        "batch norm": lambda: nn.BatchNorm1d(t).eval(),
        "prelu": lambda: nn.PReLU(),
        "scale": lambda: Map(lambda m, x: x * m.p, p=parameter(d)),
        "shift": lambda: Map(lambda m, x: m.p + x, p=parameter(1, t, 1)),
        "positions": lambda: Map(lambda m, x: x + m.p, p=parameter(t, d)),
        "product": lambda: Map(lambda m, x: x @ m.p, p=parameter(d, d)),
        "einsum": lambda: Map(lambda m, x: torch.einsum("btd,de->bte", x, m.p), p=parameter(d, d)),
        "positive weight": lambda: Map(lambda m, x: F.linear(x, m.p.exp()), p=parameter(d, d)),
        "masked weight": lambda: Map(
            lambda m, x: F.linear(x, m.p * m.mask), p=parameter(d, d), mask=torch.ones(d, d).tril()
        ),
        "weight norm": lambda: weight_norm(nn.Linear(d, d)),
        "attention": lambda: Map(attention, q=nn.Linear(d, d), k=nn.Linear(d, d), v=nn.Linear(d, d)),
        "multi-head": lambda: Map(
            lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(d, 1, batch_first=True)
        ),
        "lstm": lambda: Map(lambda m, x: m.a(x)[0], a=nn.LSTM(d, d, batch_first=True)),
        "gru, last state": lambda: Map(
            lambda m, x: x + m.a(x)[1].transpose(0, 1), a=nn.GRU(d, d, batch_first=True)
        ),
        "rnn cell": lambda: Map(unrolled, cell=nn.RNNCell(d, d)),
        "checkpoint": lambda: Map(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=nn.Linear(d, d)),
        "wrapped": lambda: Map(lambda m, x: m.a(x), a=nn.Sequential(nn.Sequential(nn.Linear(d, d)))),
        "parametrised": lambda: register_parametrization(nn.Linear(d, d), "weight", Symmetric()),
        "low rank": lambda: Map(
            lambda m, x: F.linear(x, m.w + m.b @ m.a),
            w=torch.randn(d, d),
            a=parameter(1, d),
            b=parameter(d, 1),
        ),
        "frozen": lambda: nn.Sequential(nn.Linear(d, d), nn.Linear(d, d).requires_grad_(False)),
        "low rank, frozen": lambda: Map(
            lambda m, x: F.linear(x, m.w + 2.0 * (m.b @ m.a)),
            w=frozen(d, d),
            a=parameter(1, d),
            b=parameter(d, 1),
        ),
        "low rank, beside": lambda: Map(
            lambda m, x: F.linear(x, m.w) + x @ m.a.T @ m.b.T,
            w=frozen(d, d),
            a=parameter(1, d),
            b=parameter(d, 1),
        ),
        "frozen with magnitudes": lambda: Map(
            with_magnitude, w=frozen(d, d), a=parameter(1, d), b=parameter(d, 1), p=parameter(d, 1)
        ),
        "scaled frozen": lambda: Map(lambda m, x: F.linear(x, m.p * m.w), w=frozen(d, d), p=parameter(d, 1)),
        "temperature": lambda: Map(lambda m, x: x / m.p.exp(), p=nn.Parameter(torch.tensor(0.3))),
        "quantised": lambda: Map(quantised, p=parameter(d, d)),
        "learned start": lambda: Map(with_start, p=parameter(d), a=nn.Linear(d, d), b=nn.Linear(d, d)),
        "several kernels": lambda: Map(
            lambda m, x: torch.einsum("btk,btd,kde->bte", m.a(x).softmax(-1), x, m.p),
            a=nn.Linear(d, 2),
            p=parameter(2, d, d),
        ),
        "chosen kernels": lambda: Map(
            lambda m, x: torch.bmm(m.a(x), m.p[(x[:, 0, 0] > 0).long()]),
            a=nn.Linear(d, d),
            p=parameter(2, d, d),
        ),
        "centres": lambda: Map(
            lambda m, x: x + torch.exp(-torch.cdist(x, m.p)).sum(-1, True), p=parameter(3, d)
        ),
        "cosines": lambda: Map(
            lambda m, x: F.normalize(x, dim=-1) @ F.normalize(m.p, dim=1).T, p=parameter(d, d)
        ),
        "gradient reversed": lambda: Map(lambda m, x: x + Reversed.apply(m.a(x)), a=nn.Linear(d, d)),
        "called by functions": lambda: Map(
            lambda m, x: functional_call(m.a, dict(m.a.named_parameters()), (x,)), a=nn.Linear(d, d)
        ),
        "two heads": lambda: Map(
            lambda m, x: m.a(x) * m.b(x.mean(1)).unsqueeze(1), a=nn.Linear(d, d), b=nn.Linear(d, d)
        ),
        "mixture of experts": lambda: Map(
            lambda m, x: sum(
                g.unsqueeze(-1) * e(x) for g, e in zip(m.g(x).softmax(-1).unbind(-1), m.e, strict=True)
            ),
            g=nn.Linear(d, 2),
            e=nn.ModuleList([nn.Linear(d, d), nn.Linear(d, d)]),
        ),
        "codebook": lambda: Map(
            lambda m, x: x + (m.p[torch.cdist(x, m.p.detach()).argmin(-1)] - x) * 0.5, p=parameter(3, d)
        ),
        "bilinear": lambda: Map(lambda m, x: m.a(x, x), a=nn.Bilinear(d, d, d)),
        "gate": lambda: Map(lambda m, x: x * m.a(x.mean(1)).sigmoid().unsqueeze(1), a=nn.Linear(d, d)),
        "token": lambda: Map(
            lambda m, x: torch.cat([m.p.expand(len(x), 1, -1), x[:, 1:]], 1), p=parameter(1, 1, d)
        ),
    }


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "softmax over positions": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, -1),
    "sort": lambda x: x.sort(-1).values,
    "columns": lambda x: x[..., torch.arange(x.shape[-1]).flip(0)],
    "positions by an index": lambda x: x[:, torch.zeros(x.shape[1], dtype=torch.long)],
    "gather": lambda x: x.gather(2, x.detach().argsort(2)),
    "transposed and back": lambda x: (x.transpose(0, 1) * 1.5).transpose(0, 1),
    "time first": lambda x: x.permute(1, 0, 2).cumsum(0).permute(1, 0, 2),
    "merged and back": lambda x: x.reshape(-1, x.shape[2]).sin().view_as(x),
    "flat and back": lambda x: x.flatten(1).cos().view_as(x),
    "split and joined": lambda x: torch.cat(list(x.split(1, 1))[::-1], 1),
    "unbound and stacked": lambda x: torch.stack([k * 2 for k in x.unbind(1)], 1),
    "examples in a loop": lambda x: torch.stack([k.sin() for k in x]),
    "cut and joined": lambda x: torch.cat([x[i : i + 1] * 2 for i in range(len(x))]),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5),
    "clamp": lambda x: x.clamp(-1, 1),
    "normalised": lambda x: F.normalize(x, dim=-1),
    "centred": lambda x: x - x.mean((1, 2), keepdim=True),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "products of positions": lambda x: torch.bmm(x, x.transpose(1, 2)).sum(2, keepdim=True) * x,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "pooled": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "padded": lambda x: F.pad(x, (1, 0))[..., :-1],
    "log-sum-exp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "spectrum": lambda x: torch.fft.ifft(torch.fft.fft(x) * 2).real,
    "filled": lambda x: filled(None, x),  # type: ignore[arg-type]
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1).mean(1),
    "repeated": lambda x: x.repeat(1, 1, 2)[..., : x.shape[2]],
    "interleaved": lambda x: x.repeat_interleave(2, 0).view(len(x), 2, *x.shape[1:]).sum(1),
    "there and back": lambda x: x[torch.arange(len(x)).flip(0)][torch.arange(len(x)).flip(0)],
    "largest": lambda x: x * x.amax(2, keepdim=True).sigmoid(),
    "topk": lambda x: x + x.topk(1, -1).values,
    "detached gate": lambda x: x * x.detach().sigmoid(),
    "double": lambda x: x + x,
    "renormed": lambda x: torch.renorm(x, 2, 0, 1.0),
    "straight through": lambda x: x + (x.round() - x).detach(),
    "windows of positions": lambda x: F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).mean(-1),
    "with noise in front": lambda x: (x.unsqueeze(0) + torch.ones(5, 1, *x.shape[1:], dtype=x.dtype)).mean(0),
    "outer products": lambda x: torch.einsum("bti,btj->btij", x, x).mean(-1),
    "quantile": lambda x: x - x.quantile(0.5, dim=2, keepdim=True),
    "long way": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(-1).contiguous(),
}


def others(x: Tensor) -> Tensor:
    return torch.arange(len(x)).roll(1)


def averaging(x: Tensor) -> Tensor:
    """A matrix that mixes the examples."""
    return torch.full((len(x), len(x)), 0.3, dtype=x.dtype) + torch.eye(len(x), dtype=x.dtype)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "log-softmax": lambda x: x.log_softmax(0),
    "roll": lambda x: x + x.roll(1, 0),
    "flip": lambda x: x * x.flip(0),
    "sort": lambda x: x.sort(0).values + x,
    "mixup": lambda x: 0.4 * x + 0.6 * x[others(x)],
    "index_select": lambda x: x - x.index_select(0, others(x)),
    "product": lambda x: torch.einsum("ab,btd->atd", averaging(x), x),
    "matrix": lambda x: (averaging(x) @ x.flatten(1)).view_as(x),
    "sparse": lambda x: torch.sparse.mm(averaging(x).to_sparse(), x.flatten(1)).view_as(x),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, others(x) // 2, x) + x,
    "scatter_add": lambda x: (
        torch.zeros_like(x).scatter_add(0, (others(x) // 2)[:, None, None].expand_as(x), x) + x
    ),
    "gather": lambda x: x.gather(0, others(x)[:, None, None].expand_as(x)) * x,
    "index_put": lambda x: torch.zeros_like(x).index_put((others(x),), x) + x,
    "against the first": lambda x: x - x[:1],
    "against one": lambda x: x - x[-1],
    "neighbours": lambda x: torch.cat([x[1:], x[:1]]) * x,
    "every pair": lambda x: (x.unsqueeze(0) - x.unsqueeze(1)).sin().sum(0),
    "similarities": lambda x: (x.flatten(1) @ x.flatten(1).T).softmax(1).sum(1)[:, None, None] * x,
    "attention over examples": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(
        0, 1
    ),
    "written from others": lambda x: copied(x),
    "pooled over examples": lambda x: F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "normed over examples": lambda x: x / x.norm(dim=0, keepdim=True),
    "product of all": lambda x: x + x.prod(0),
    "largest of all": lambda x: x - x.max(0).values,
    "log-sum-exp": lambda x: x - x.logsumexp(0),
    "windows": lambda x: torch.cat([x, x[:1]]).unfold(0, 2, 1).mean(-1),
    "spectrum of examples": lambda x: torch.fft.fft(x, dim=0).abs(),
    "largest so far": lambda x: x.cummax(0).values + x,
    "in pairs": lambda x: torch.stack([x, x.roll(1, 0)]).prod(0),
    "bags": lambda x: (
        torch.zeros_like(x).scatter_reduce(0, (others(x) // 2)[:, None, None].expand_as(x), x, "amax") + x
    ),
    "normed layers": lambda x: F.layer_norm(x.transpose(0, 2), (len(x),)).transpose(0, 2),
    "groups": lambda x: F.group_norm(x.transpose(0, 1), 1).transpose(0, 1),
    "distances": lambda x: torch.cdist(x.flatten(1), x.flatten(1)).sum(1)[:, None, None] + x,
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[-1:]) * x,
    "masked scatter": lambda x: (
        torch.zeros_like(x).masked_scatter((torch.arange(len(x)) > 0)[:, None, None].expand_as(x), x) + x
    ),
    "matrix with weights": lambda x: torch.einsum("btd,ctd->bc", x, x).sum(1)[:, None, None] + x,
    "take along": lambda x: x.take_along_dim(others(x)[:, None, None].expand_as(x), 0) * x,
    "quantile": lambda x: x - x.quantile(0.5, dim=0),
    "solved": lambda x: torch.linalg.solve(averaging(x), x.flatten(1)).view_as(x),
}


def copied(x: Tensor) -> Tensor:
    out = x.clone()
    out[1:] = x[:-1] * 2
    return out * x


def random_choice(random: Random, table: dict):
    name = random.choice(sorted(table))
    return name, table[name]
