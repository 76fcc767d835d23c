"""Layers that meet many weight samples in one run: those with an exact answer, and those that are refused."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M, T, VOCABULARY = 7, 6, 11


class Then(nn.Module):
    """A module of which a function of the result goes on."""

    def __init__(self, inner: nn.Module, pick):
        super().__init__()
        self.inner, self.pick = inner, pick

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.inner(x))


class Turned(nn.Module):
    """A module that wants time first."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1))[0].transpose(0, 1)


class Cell(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


class Attention(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner.batch_first else x.transpose(0, 1)
        out = self.inner(x, x, x, need_weights=False)[0]
        return out if self.inner.batch_first else out.transpose(0, 1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :3], x[:, 3:])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.middle(self.table(tokens)).tanh().mean(1), self.table.weight)


class Positions(nn.Module):
    """A table of positions: rows of a parameter are picked before they meet the examples."""

    def __init__(self, by: str):
        super().__init__()
        self.tokens, self.by = nn.Embedding(VOCABULARY, 4), by
        self.places = nn.Embedding(9, 4) if by == "embedding" else nn.Parameter(torch.randn(9, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        picked = self.places[:T] if self.by == "slice" else self.places(torch.arange(T))
        return self.tokens(tokens) + picked


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(T, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).tanh()


class Merged(nn.Module):
    """Positions of all examples as rows, seen by two layers, the second of which has other rows for each sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.reshape(-1, 4)).tanh().view(x.shape)
        return self.second(hidden.view(-1, 4)).view(x.shape)


class Product(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(4, 4)), kind

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.kind == "matmul" else torch.einsum("btd,de->bte", x, self.weight)


class Begun(nn.Module):
    """A state that is learned is repeated for the examples."""

    def __init__(self):
        super().__init__()
        self.inner, self.start = nn.GRU(4, 5, batch_first=True), nn.Parameter(torch.rand(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.start.expand(1, len(x), 5).contiguous())[0]


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.tanh())


def encoder(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, **options)


def sequence(pair: tuple[Tensor, ...]) -> Tensor:
    return pair[0]


TOKENS, ROWS, SEQUENCE, SIGNAL, IMAGE = (M, T), (M, 4), (M, T, 4), (M, 2, 8), (M, 2, 6, 6)
EXACT: dict[str, tuple] = {  # a head comes after each
    "embedding": (lambda: nn.Embedding(VOCABULARY, 4), TOKENS),
    "embedding, padding": (lambda: nn.Embedding(VOCABULARY, 4, padding_idx=3), TOKENS),
    "embedding, lstm": (
        lambda: nn.Sequential(
            nn.Embedding(VOCABULARY, 4), Then(nn.LSTM(4, 5, batch_first=True), lambda r: r[0][:, -1])
        ),
        TOKENS,
    ),
    "lstm, projected": (lambda: Then(nn.LSTM(4, 5, batch_first=True, proj_size=2), sequence), SEQUENCE),
    "lstm, last state": (lambda: Then(nn.LSTM(4, 5, batch_first=True), lambda r: r[1][1][0]), SEQUENCE),
    "lstm cell": (lambda: Cell(nn.LSTMCell(4, 5)), SEQUENCE),
    "gru cell": (lambda: Cell(nn.GRUCell(4, 5)), SEQUENCE),
    "attention": (lambda: Attention(True), SEQUENCE),
    "attention, time first": (lambda: Attention(False), SEQUENCE),
    "encoder": (lambda: encoder(), SEQUENCE),
    "encoder, norm first": (lambda: encoder(norm_first=True, activation="gelu"), SEQUENCE),
    "embedding, encoder": (lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), encoder()), TOKENS),
    "decoder": (Decoder, SEQUENCE),
    "conv1d, circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), SIGNAL),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), IMAGE),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 3, 3, 2), SIGNAL),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 3, 3, 2, output_padding=1), IMAGE),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)), SEQUENCE),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), IMAGE),
    "tied": (Tied, TOKENS),
    "positions, slice": (lambda: Positions("slice"), TOKENS),
    "positions, embedding": (lambda: Positions("embedding"), TOKENS),
    "bare": (Bare, SEQUENCE),
    "merged": (Merged, SEQUENCE),
    "matmul": (lambda: Product("matmul"), SEQUENCE),
}
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    for what, options in {"2 layers": {"num_layers": 2}, "both ways": {"bidirectional": True}}.items():
        EXACT[f"{kind.__name__}, {what}"] = (
            lambda kind=kind, options=options: Then(kind(4, 5, batch_first=True, **options), sequence),
            SEQUENCE,
        )
    EXACT[f"{kind.__name__}, time first"] = (
        lambda kind=kind: Turned(kind(4, 5, num_layers=2, bias=False)),
        SEQUENCE,
    )

REFUSED = {
    "embedding bag": (lambda: nn.EmbeddingBag(VOCABULARY, 4), TOKENS),
    "bilinear": (Bilinear, ROWS),
    "einsum": (lambda: Product("einsum"), SEQUENCE),
    "learned state": (Begun, SEQUENCE),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), ROWS),
}
BATCH_NORM = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)),
    "batch norm, not affine": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False)),
}


class Headed(nn.Module):
    def __init__(self, body: nn.Module, x: Tensor):
        super().__init__()
        self.body = body
        with torch.no_grad():
            width = body(x).flatten(1).shape[1]
        self.head = nn.Linear(width, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def build(make, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = make().double()
        x = torch.randint(0, VOCABULARY, shape) if shape == TOKENS else torch.randn(shape).double()
        return Headed(body, x), x, torch.arange(shape[0]) % 3
