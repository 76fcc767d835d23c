"""Little modules that nobody ships: parameters met, shared, masked and transposed in every way."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class ByLists(nn.Module):
    """A convolution whose stride, padding and dilation are lists, which a module would make tuples of."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, dims = layer, layer.weight.dim() - 2
        self.function, self.numbers = getattr(torch, f"conv{dims}d"), [[n] * dims for n in (2, 3, 2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.layer.weight, self.layer.bias, *self.numbers)


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


class Decoder(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))
