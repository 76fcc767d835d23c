"""The table of layers: a name, how to build the model, and what to feed it. One row is one promise."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.curvature.modules import (
    Attention,
    BareParameters,
    ByLists,
    Decoder,
    InPlaceArithmetic,
    LeftProduct,
    Masked,
    NoRule,
    SiluMLP,
    Steps,
    TiedEmbedding,
    TimeMajorAttention,
    TimeMajorLSTM,
    TinyGPT,
    Transposed,
    TwoInputs,
    frozen,
    twice,
    zero_weight,
)


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
            Case(f"Conv{d}d by lists", lambda c=conv: ByLists(c(4, 8, 3)), shape),
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
            Case(f"BatchNorm{d}d eval, called twice", lambda n=norm: twice(n(4)).eval(), shape),
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
