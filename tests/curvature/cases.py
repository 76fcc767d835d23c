"""The table of layers: a name, how to build the model, and what to feed it. One row is one promise."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0  # > 0: integers below this instead of normal numbers

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
        """The model with random parameters and buffers, and its input, from a seed of their own."""
        with torch.random.fork_rng():
            torch.manual_seed(sum(map(ord, self.name)))
            model = self.model().to(dtype)
            for tensor in (*model.parameters(), *model.buffers()):
                if (
                    tensor.is_floating_point()
                    and tensor.dim() == 1
                    and torch.equal(tensor, torch.zeros_like(tensor))
                ):
                    tensor.data.uniform_(-1, 1)
            if self.tokens:
                return model, torch.randint(0, self.tokens, self.shape)
            return model, torch.randn(self.shape).to(dtype)


class Attention(nn.Module):
    def __init__(self, cross: bool = False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.cross = cross

    def forward(self, x: Tensor) -> Tensor:
        key, value = (2 * x.flip(1), x + 1) if self.cross else (x, x)
        return self.attention(x, key, value, need_weights=False)[0]


class TimeMajorAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class Steps(nn.Module):
    """A cell, called once a step."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


class TimeMajorLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.transpose(0, 1))[1][0][-1])


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens), self.embedding.weight)


class BareParameters(nn.Module):
    """A class token, a positional table, a layer scale, a temperature, x @ W and x @ v."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 20, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.temperature = nn.Parameter(torch.randn(()))
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.vector = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions[:, : x.shape[1] + 1]
        return ((x * self.scale * self.temperature.exp()) @ self.matrix) @ self.vector


class TinyGPT(nn.Module):
    """Positions that are the same for all examples, and products on rows (B·T, d)."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return torch.addmm(self.bias, hidden.view(-1, 4), self.weight).view(*tokens.shape, 6)


class Masked(nn.Module):
    """A pruned weight; the mask has as many rows as the batch has examples."""

    def __init__(self, registered: bool):
        super().__init__()
        mask = torch.rand(5, 4).round()
        self.weight = nn.Parameter(torch.randn(5, 4))
        if registered:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask)


class InPlaceArithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        x += self.a
        x *= self.b
        x -= self.a
        x.add_(self.b, alpha=0.5)
        return 1 - x / self.b + (2 - self.a) * x


class NoRule(nn.Module):
    """Operations without a rule of their own."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bi,oi->bo", x, self.weight)
        return (
            torch.maximum(out, self.bias)
            + torch.baddbmm(self.bias, x.unsqueeze(1), self.weight.T.expand(len(x), 4, 5))[:, 0]
        )


class LeftProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.weight @ x) + x.mean((1, 2), keepdim=True) @ self.weight.mean().view(1, 1)


class Transposed(nn.Module):
    """One weight, as it is and transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x @ self.weight.T), self.weight.t()) @ self.weight.mT


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, 2 * x)


class SiluMLP(nn.Module):
    """Half of the outputs unused, and one layer never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.used(x))[:, ::2]


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen(model: nn.Sequential, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def zero_weight(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight[0] = 0
    return norm


def _convolutions() -> list[Case]:
    rows = []
    for d in (1, 2, 3):
        conv, transposed = getattr(nn, f"Conv{d}d"), getattr(nn, f"ConvTranspose{d}d")
        norm, instance = getattr(nn, f"BatchNorm{d}d"), getattr(nn, f"InstanceNorm{d}d")
        shape = (3, 4, *[7] * d)
        options = {
            "plain": {},
            "stride": {"stride": 2, "padding": 1},
            "dilation": {"dilation": 2, "padding": 2},
            "groups": {"groups": 2, "bias": False},
            "depthwise": {"groups": 4},
            "same": {"padding": "same"},
            "valid": {"padding": "valid"},
            "reflect": {"padding": 1, "padding_mode": "reflect"},
            "circular": {"padding": 1, "padding_mode": "circular"},
            "replicate": {"padding": 1, "padding_mode": "replicate"},
        }
        rows += [
            Case(f"Conv{d}d {k}", lambda c=conv, o=o: c(4, 8, 3, **o), shape) for k, o in options.items()
        ]
        rows += [
            Case(f"Conv{d}d same, even kernel", lambda c=conv: c(4, 8, 4, padding="same"), shape),
            Case(f"Conv{d}d one position", lambda c=conv: c(4, 8, 7), shape),
            Case(f"Conv{d}d called twice", lambda c=conv: twice(c(4, 4, 3, padding=1)), shape),
            Case(f"ConvTranspose{d}d", lambda c=transposed: c(4, 6, 3), shape),
            Case(
                f"ConvTranspose{d}d stride, groups",
                lambda c=transposed: c(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
                shape,
            ),
            Case(
                f"ConvTranspose{d}d dilation", lambda c=transposed: c(4, 6, 3, dilation=2, bias=False), shape
            ),
            Case(f"BatchNorm{d}d eval", lambda n=norm: n(4).eval(), shape),
            Case(f"BatchNorm{d}d eval, zero weight", lambda n=norm: zero_weight(n(4)).eval(), shape),
            Case(f"InstanceNorm{d}d", lambda n=instance: n(4, affine=True), shape),
            Case(
                f"InstanceNorm{d}d eval",
                lambda n=instance: n(4, affine=True, track_running_stats=True).eval(),
                shape,
            ),
            Case(f"GroupNorm {d}d", lambda: nn.GroupNorm(2, 4), shape),
        ]
    return rows


def _recurrent() -> list[Case]:
    rows = []
    for kind in ("RNN", "LSTM", "GRU"):
        layer, cell = getattr(nn, kind), getattr(nn, f"{kind}Cell")
        options = {
            "": {},
            "two layers, both directions": {"num_layers": 2, "bidirectional": True},
            "no bias": {"bias": False},
        }
        rows += [
            Case(f"{kind} {k}", lambda m=layer, o=o: m(4, 3, batch_first=True, **o), (3, 5, 4))
            for k, o in options.items()
        ]
        rows += [
            Case(f"{kind}Cell", lambda c=cell: Steps(c(4, 3)), (3, 5, 4)),
            Case(f"{kind}Cell no bias", lambda c=cell: Steps(c(4, 3, bias=False)), (3, 5, 4)),
        ]
    return [
        *rows,
        Case("RNN relu", lambda: nn.RNN(4, 3, batch_first=True, nonlinearity="relu"), (3, 5, 4)),
        Case("LSTM projected", lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True), (3, 5, 4)),
        Case("LSTM time-major inside", TimeMajorLSTM, (3, 5, 4)),
    ]


def _attention() -> list[Case]:
    encoder = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    shape = (3, 5, 8)
    return [
        Case("MultiheadAttention", Attention, shape),
        Case("MultiheadAttention square", Attention, (5, 5, 8)),
        Case("MultiheadAttention eval", lambda: Attention().eval(), shape),
        Case("MultiheadAttention cross", lambda: Attention(cross=True), shape),
        Case("MultiheadAttention kdim", lambda: Attention(cross=True, kdim=8, vdim=8), shape),
        Case("MultiheadAttention bias_kv", lambda: Attention(add_bias_kv=True), shape),
        Case("MultiheadAttention no bias", lambda: Attention(bias=False), shape),
        Case("MultiheadAttention time-major inside", TimeMajorAttention, shape),
        Case("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(**encoder), shape),
        Case("TransformerEncoderLayer eval", lambda: nn.TransformerEncoderLayer(**encoder).eval(), shape),
        Case(
            "TransformerEncoderLayer norm first",
            lambda: nn.TransformerEncoderLayer(**encoder, norm_first=True),
            shape,
        ),
        Case(
            "TransformerEncoder",
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**encoder), 2),
            shape,
        ),
        Case("TransformerDecoderLayer", lambda: Decoder(nn.TransformerDecoderLayer(**encoder)), shape),
    ]


class Decoder(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


def _others() -> list[Case]:
    parametrize = nn.utils.parametrizations
    return [
        Case("Linear", lambda: nn.Linear(4, 3), (5, 4)),
        Case("Linear no bias", lambda: nn.Linear(4, 3, bias=False), (5, 4)),
        Case("Linear 3-D", lambda: nn.Linear(4, 3), (5, 6, 4)),
        Case("Linear 4-D", lambda: nn.Linear(4, 3), (5, 2, 3, 4)),
        Case("Linear one example", lambda: nn.Linear(4, 3), (1, 4)),
        Case("Linear called twice", lambda: twice(nn.Linear(4, 4)), (5, 4)),
        Case("Linear 3-D called twice", lambda: twice(nn.Linear(4, 4)), (5, 3, 4)),
        Case(
            "MLP, in-place ReLU",
            lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(True), nn.Linear(8, 3)),
            (5, 4),
        ),
        Case(
            "frozen weight",
            lambda: frozen(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "1.weight"),
            (5, 4),
        ),
        Case(
            "frozen layer",
            lambda: frozen(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "0.weight", "0.bias"),
            (5, 4),
        ),
        Case("frozen bias", lambda: frozen(nn.Sequential(nn.Conv2d(2, 3, 3)), "0.bias"), (3, 2, 5, 5)),
        Case("BatchNorm1d eval, 2-D", lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
        Case("LayerNorm", lambda: nn.LayerNorm(4), (5, 4)),
        Case("LayerNorm 3-D", lambda: nn.LayerNorm(4), (3, 5, 4)),
        Case("LayerNorm over two", lambda: nn.LayerNorm((5, 4)), (3, 5, 4)),
        Case("LayerNorm no bias", lambda: nn.LayerNorm(4, bias=False), (3, 5, 4)),
        Case("LayerNorm zero weight", lambda: zero_weight(nn.LayerNorm(4)), (3, 5, 4)),
        Case("RMSNorm", lambda: nn.RMSNorm(4), (3, 5, 4)),
        Case("GroupNorm 2-D", lambda: nn.GroupNorm(2, 4), (3, 4)),
        Case("Embedding", lambda: nn.Embedding(7, 3), (4, 6), tokens=7),
        Case("Embedding one token", lambda: nn.Embedding(7, 3), (4,), tokens=7),
        Case("Embedding padding_idx", lambda: nn.Embedding(7, 3, padding_idx=2), (4, 9), tokens=7),
        Case("EmbeddingBag", lambda: nn.EmbeddingBag(7, 3), (4, 6), tokens=7),
        Case("EmbeddingBag sum", lambda: nn.EmbeddingBag(7, 3, mode="sum"), (4, 6), tokens=7),
        Case("tied embedding", TiedEmbedding, (4, 6), tokens=7),
        Case("PReLU", lambda: nn.PReLU(), (3, 4, 5)),
        Case("PReLU per channel", lambda: nn.PReLU(4), (3, 4, 5)),
        Case("PReLU 2-D", lambda: nn.PReLU(4), (3, 4)),
        Case("Bilinear", TwoInputs, (3, 4)),
        Case("bare parameters", BareParameters, (3, 5, 4)),
        Case("bare parameters, one example", BareParameters, (1, 5, 4)),
        Case("GPT-2 rows", TinyGPT, (5, 6), tokens=7),
        Case("GPT-2 rows, T = M", TinyGPT, (5, 5), tokens=7),
        Case("weight norm", lambda: parametrize.weight_norm(nn.Linear(4, 3)), (5, 4)),
        Case("weight norm, convolution", lambda: parametrize.weight_norm(nn.Conv2d(2, 3, 3)), (3, 2, 5, 5)),
        Case("weight norm, called twice", lambda: twice(parametrize.weight_norm(nn.Linear(4, 4))), (5, 4)),
        Case("spectral norm eval", lambda: parametrize.spectral_norm(nn.Linear(4, 3)).eval(), (5, 4)),
        Case("orthogonal", lambda: parametrize.orthogonal(nn.Linear(3, 3)), (5, 3)),
        Case("masked by a buffer, M rows", lambda: Masked(registered=True), (5, 4)),
        Case("masked by a tensor, M rows", lambda: Masked(registered=False), (5, 4)),
        Case("in-place arithmetic", InPlaceArithmetic, (6, 4)),
        Case("no rule: einsum, maximum, baddbmm", NoRule, (6, 4)),
        Case("W @ x", LeftProduct, (6, 4, 5)),
        Case("W and its transposes", Transposed, (7, 4)),
        Case("unused layer", SiluMLP, (5, 4)),
    ]


CASES = [*_others(), *_convolutions(), *_attention(), *_recurrent()]
