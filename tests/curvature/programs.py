"""Weights that are computed before they meet the examples, and examples that meet one another, in many ways.

`EXACT` programs have squares, those of a loop over batches of one. `REFUSED` ones count rows of a parameter as
examples, or mix examples: as many rows as examples, so that nothing else can notice it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M, D = 5, 5  # examples and features: the same number, on purpose
Program = Callable[["Tensors", Tensor], Tensor]


class Tensors(nn.Module):
    """Parameters, registered constants, and constants that are plain attributes."""

    def __init__(self):
        super().__init__()
        self.weight, self.spread = (nn.Parameter(torch.randn(D, D)) for _ in range(2))
        self.bias, self.gain = (nn.Parameter(torch.randn(D)) for _ in range(2))
        self.kernel = nn.Parameter(torch.randn(D, D, 3))
        self.one, self.row, self.point = (nn.Parameter(torch.randn(s)) for s in ((1,), (1, D), ()))
        self.slim = nn.Parameter(torch.randn(D, 1, 3))
        self.table = nn.Embedding(D, D)
        self.inner = nn.Linear(D, D)
        self.maker = nn.Linear(D, D * D)
        self.register_buffer("known", torch.randn(D, D))
        self.register_buffer("ids", torch.arange(D))
        self.turn, self.mask = torch.randn(D, D), torch.rand(D, D).round()
        self.numbers, self.scale = torch.arange(D), torch.rand(D)
        self.layers = torch.rand(D, D, 3).round()


class Model(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.tensors, self.program = Tensors(), program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.tensors, x)


def images(x: Tensor) -> Tensor:
    """(M, D) → (M, D, 7)."""
    return torch.stack([(x * k).sin() for k in range(1, 8)], 2)


def own_matrices(m: Tensors, x: Tensor) -> Tensor:
    return m.maker(x).view(-1, D, D)


def one_by_one(m: Tensors, x: Tensor) -> Tensor:
    return torch.stack([F.linear(row, w) for row, w in zip(x, own_matrices(m, x), strict=True)])


def cut_one_by_one(m: Tensors, x: Tensor) -> Tensor:
    w = own_matrices(m, x)
    return torch.cat([x[i : i + 1] @ w[i] for i in range(len(x))])


def modulated(m: Tensors, x: Tensor) -> Tensor:
    """A convolution with weights of each example, as generators of images have them."""
    styles, rows = m.inner(x), images(m.table.weight[0] * x)
    weights = m.kernel.unsqueeze(0) * styles.view(-1, 1, D, 1)
    weights = weights * (weights.square().sum((2, 3), keepdim=True) + 1e-3).rsqrt()
    out = F.conv1d(rows.reshape(1, -1, 7), weights.reshape(-1, D, 3), groups=len(x))
    return out.view(len(x), D, -1)


def own_filters(m: Tensors, x: Tensor) -> Tensor:
    filters = m.maker(x)[:, : 3 * D].reshape(-1, 1, 3)
    return F.conv1d(images(x).view(1, -1, 7), filters, groups=len(filters)).view(len(x), D, -1)


def own_norms(m: Tensors, x: Tensor) -> Tensor:
    """Adaptive instance normalisation, written with batch_norm."""
    weight, bias = m.inner(x).reshape(-1), (x @ m.weight).reshape(-1)
    rows = images(x).view(1, -1, 7)
    return F.batch_norm(rows, None, None, weight, bias, training=True).view(len(x), D, 7)


def attention(m: Tensors, x: Tensor) -> Tensor:
    rows = images(x).transpose(1, 2)
    q, k, v = F.linear(rows, m.weight), m.inner(rows), rows @ m.spread
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def attention_by_einsum(m: Tensors, x: Tensor) -> Tensor:
    rows = images(x).transpose(1, 2)
    scores = torch.einsum("btd,bsd->bts", F.linear(rows, m.weight), m.inner(rows))
    return torch.einsum("bts,bsd->btd", scores.softmax(-1), rows)


def noisy_logits(m: Tensors, x: Tensor) -> Tensor:
    """As many draws as one likes, in front of the examples."""
    noise = torch.tensor([-1.0, 0.5, 2.0], dtype=x.dtype).view(3, 1, 1)
    return (m.inner(x) + F.linear(x, m.weight) * noise).transpose(0, 1)


def time_first(m: Tensors, x: Tensor) -> Tensor:
    states, query = m.inner(images(x).transpose(1, 2)).transpose(0, 1), F.linear(x, m.weight)
    return torch.tanh(states + query).transpose(0, 1)


def spectral(m: Tensors, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.weight.norm() + 1
        sign = torch.where(m.weight > 0, 1.0, size)
    return F.linear(x, m.weight.exp() * sign / size)


def variational(m: Tensors, x: Tensor) -> Tensor:
    """A weight with noise of its own shape; a fixed one, so that every example sees the same."""
    weight = m.weight + F.softplus(m.spread) * torch.full_like(m.spread, 0.3)
    return F.linear(x, weight, m.bias + m.gain.exp() * torch.ones_like(m.gain))


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x)


def parts(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(1)


def filtered(m: Tensors, x: Tensor) -> Tensor:
    """A filter in the frequencies, as its complex gains and as the spectrum of a kernel."""
    return torch.fft.ifft(spectrum(x) * torch.complex(m.gain, m.bias) * spectrum(m.slim[:, 0, 0])).real


EXACT: dict[str, Program] = {
    "product with a vector": lambda m, x: torch.mv(x, m.gain).unsqueeze(1),
    "product over a table": lambda m, x: torch.tensordot(x, m.kernel, 1),
    "inner product": lambda m, x: torch.inner(x, m.weight),
    "distances to prototypes": lambda m, x: torch.cdist(m.inner(x), m.weight),
    "distances in each example": lambda m, x: torch.cdist(
        m.inner(images(x).mT), F.linear(images(x).mT, m.weight)
    ),
    "solved for each example": lambda m, x: torch.linalg.solve(m.weight, x.unsqueeze(2)).squeeze(2),
    "a bias of one number": lambda m, x: F.linear(x, m.weight, m.one),
    "a bias that is a row": lambda m, x: F.linear(x, m.weight, m.row),
    "a bias of one number alone": lambda m, x: F.linear(x, m.known, m.one),
    "a weight that is a vector": lambda m, x: F.linear(images(x).mT, m.gain),
    "a weight that is a vector, and a bias": lambda m, x: F.linear(images(x).mT, m.gain, m.point),
    "addmm with a bias of one number": lambda m, x: torch.addmm(m.one, x, m.weight),
    "addmm with a bias that is a row": lambda m, x: torch.addmm(m.row, x, m.weight),
    "complex gains": filtered,
    "complex product": lambda m, x: parts(spectrum(x) @ torch.complex(m.weight, m.spread)),
    "complex layer": lambda m, x: parts(
        F.linear(spectrum(x), torch.complex(m.weight, m.spread), torch.complex(m.gain, m.bias))
    ),
    "complex convolution": lambda m, x: parts(
        F.conv1d(spectrum(images(x)), torch.complex(m.kernel, m.kernel.exp()))
    ),
    "complex quotient": lambda m, x: parts((spectrum(x) - m.gain) / torch.complex(m.bias, m.gain)),
    "turned by a buffer": lambda m, x: F.linear(x, m.weight @ m.known),
    "turned by a buffer, computed": lambda m, x: F.linear(x, (2 * m.known.T).exp() @ m.weight, m.bias),
    "masked by a tensor": lambda m, x: F.linear(x, m.weight * m.mask),
    "masked kernel": lambda m, x: F.conv1d(images(x), m.kernel * m.layers),
    "positions in a buffer": lambda m, x: m.inner(images(x).transpose(1, 2)[:, :D] + m.table(m.ids)),
    "the parameter's own values": lambda m, x: F.linear(x, m.weight.exp() / m.weight.detach().norm()),
    "own values without gradient": spectral,
    "noise of the parameter's shape": variational,
    "matrices of examples, bmm": lambda m, x: torch.bmm(own_matrices(m, x), x.unsqueeze(2)).squeeze(2),
    "matrices of examples, einsum": lambda m, x: torch.einsum("boi,bi->bo", own_matrices(m, x), x),
    "matrices of examples, one by one": one_by_one,
    "matrices of examples, cut": cut_one_by_one,
    "modulated convolution": modulated,
    "filters of examples": own_filters,
    "norms of examples": own_norms,
    "attention": attention,
    "attention by einsum": attention_by_einsum,
    "gates": lambda m, x: images(x) * m.inner(x).sigmoid().unsqueeze(2),
    "a token for all": lambda m, x: F.linear(m.gain.expand(len(x), D) + x, m.weight),
    "a token for all, derived": lambda m, x: m.inner(m.gain.exp().expand(len(x), D) * x) @ m.weight,
    "rows of features, tiled": lambda m, x: m.inner(x).repeat(1, 2),
    "draws in front": noisy_logits,
    "time in front": time_first,
    "einsum with as many outputs as examples": lambda m, x: torch.einsum("bi,oik->bok", x, m.kernel),
    "einsum, its result implied": lambda m, x: torch.einsum("bi, io", x, m.weight),
    "einsum, the rest implied": lambda m, x: torch.einsum("oi,...i->...o", m.weight, x),
    "experts": lambda m, x: torch.einsum("bd,edh,be->bh", x, m.kernel, m.inner(x).softmax(1)),
    "queries for all": lambda m, x: m.weight.expand(len(x), D, D) @ m.inner(images(x).transpose(1, 2)).mT,
}

REFUSED: dict[str, tuple[Program, str]] = {
    "turned": (lambda m, x: F.linear(x, m.weight @ m.turn), "'tensors.weight'.*matmul.*register_buffer"),
    "turned, with a bias": (lambda m, x: F.linear(x, m.weight @ m.turn, m.bias), "weight"),
    "turned on the left": (
        lambda m, x: F.linear(x, m.turn @ m.weight),
        "weight'.*matmul.*MmBackward0.*weight",
    ),
    "turned on the left, with a bias": (lambda m, x: F.linear(x, m.turn @ m.weight, m.bias), "linear takes"),
    "turned by F.linear": (lambda m, x: x @ F.linear(m.turn, m.weight), "rows of linear"),
    "turned, then a function": (lambda m, x: F.linear(x, (m.turn @ m.weight).relu() + 1), "weight"),
    "turned, for sequences": (lambda m, x: F.linear(images(x).mT, m.turn @ m.weight), "weight"),
    "turned, addmm": (lambda m, x: torch.addmm(m.bias, x, m.turn @ m.weight), "addmm takes"),
    "turned, einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.turn @ m.weight), "BmmBackward0"),
    "turned by einsum": (lambda m, x: F.linear(x, torch.einsum("oi,ij->oj", m.weight, m.turn)), "einsum"),
    "a vector": (lambda m, x: (x @ (m.gain.exp() * m.scale)).unsqueeze(1), "MvBackward0"),
    "masked after a function": (lambda m, x: F.linear(x, m.weight.exp() * m.mask), "rows of mul"),
    "masked, einsum": (lambda m, x: torch.einsum("bi,oi->bo", x, m.weight.exp() * m.mask), "BmmBackward0"),
    "masked by where": (lambda m, x: F.linear(x, torch.where(m.mask > 0, m.weight, 0.0)), "rows of where"),
    "masked, some rows": (lambda m, x: F.linear(x, torch.where(m.mask > 0, m.weight, 0.0)[:1]), "where"),
    "masked, stacked": (lambda m, x: F.linear(x, torch.cat([m.weight.exp() * m.mask] * 2)), "mul"),
    "masked kernel": (lambda m, x: F.conv1d(images(x), m.kernel.exp() * m.layers), "ConvolutionBackward0"),
    "masked slim kernel": (
        lambda m, x: F.conv1d(images(x), m.slim.exp() * m.layers[:, :1], groups=D),
        "ConvolutionBackward0",
    ),
    "turned slim kernel": (
        lambda m, x: F.conv1d(images(x), (m.turn @ m.weight)[:, :3].reshape(D, 1, 3), groups=D),
        "ConvolutionBackward0",
    ),
    "masked transposed kernel": (
        lambda m, x: F.conv_transpose1d(images(x), m.kernel.exp() * m.layers),
        "ConvolutionBackward0",
    ),
    "variational": (lambda m, x: F.linear(x, m.weight + m.spread.exp() * m.turn), "weight'.*rows of add"),
    "variational bias": (lambda m, x: m.inner(x) + m.gain.exp() * m.scale, "AddBackward0 repeats"),
    "variational bias alone": (lambda m, x: x + m.gain.exp() * m.scale, "AddBackward0 repeats"),
    "variational bias, linear": (lambda m, x: F.linear(x, m.known, m.gain.exp() * m.scale), "AddmmBackward0"),
    "normalisation": (lambda m, x: F.layer_norm(x, (D,), m.gain.exp() * m.scale), "NativeLayerNorm"),
    "normalisation with a bias": (
        lambda m, x: F.layer_norm(x, (D,), m.gain.exp() * m.scale, m.bias),
        "layer_norm takes",
    ),
    "a turned table": (
        lambda m, x: F.embedding(m.numbers[: len(x)], m.turn @ m.table.weight) + x,
        "EmbeddingBackward0",
    ),
    "positions": (lambda m, x: m.inner(images(x).mT[:, :D] + m.table(m.numbers)), "AddBackward0 repeats"),
    "positions, expanded": (
        lambda m, x: m.inner(images(x).mT[:, :D] + m.table(m.numbers).expand(len(x), D, D)),
        "ExpandBackward0 repeats",
    ),
    "a turned weight, repeated": (
        lambda m, x: torch.bmm(images(x).mT, (m.turn @ m.weight).repeat(len(x), 1, 1)),
        "RepeatBackward0 repeats",
    ),
    "examples in columns": (lambda m, x: (m.weight @ x.T).T, "rows of the parameter in front"),
    "einsum, models in front": (
        lambda m, x: torch.einsum("gbi,gio->gbo", x.expand(D, *x.shape), m.kernel).sum(0),
        "rows of the parameter in front",
    ),
    "einsum, examples in columns": (
        lambda m, x: torch.einsum("oi,bi->ob", m.weight, x).T,
        "rows of the parameter in front",
    ),
    "models in front": (
        lambda m, x: torch.bmm(x.expand(D, *x.shape), m.kernel).sum(0),
        "rows of the parameter in front",
    ),
    "inner product, examples in columns": (lambda m, x: torch.inner(m.weight, x).T, "inner has rows of"),
    "product over a table, examples in columns": (
        lambda m, x: torch.tensordot(m.weight, x, ([1], [1])).T,
        "tensordot has rows of the parameter in front",
    ),
    "several products, examples in columns": (
        lambda m, x: torch.linalg.multi_dot([m.weight, m.known, x.T]).T,
        "linalg_multi_dot has rows of",
    ),
    "solved, examples in columns": (
        lambda m, x: torch.linalg.solve(m.weight, x.T).T,
        "linalg_solve has rows",
    ),
    "distances, examples in columns": (lambda m, x: torch.cdist(m.weight, x).T, "cdist has rows of"),
    "distances between examples": (lambda m, x: torch.cdist(m.inner(x), m.inner(x)), "CdistBackward0"),
    "examples compared": (lambda m, x: m.inner(x) @ m.inner(x).T, "compares examples"),
    "neighbours": (lambda m, x: m.turn[: len(x), : len(x)] @ m.inner(x), "MmBackward0"),
    "prediction against every target": (
        lambda m, x: (m.inner(x) @ m.gain) - x[:, : len(x)],
        "SubBackward0 repeats",
    ),
}
