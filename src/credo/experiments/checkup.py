"""Whether credo is right on this machine, and how long its steps take: what `credo doctor` runs.

Right: one step of every method beside the same step in float64 on the CPU. Samples are left out of it, by a posterior
that is nearly a point, because plain torch on a GPU draws other noise than the CPU; the noise is judged by itself.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from credo import kernels
from credo.kernels.convolution import weight_sums
from credo.kernels.noise import normal_, sample_
from credo.models import MLP, LeNet5, ResNet18
from credo.optim import IVON, KFAC, OGN, VOGN, BayesByBackprop, NoisyKFAC

POINT: Final = 1e-20  # τ: samples are the mean but for 1e-10 of a standard deviation
STEPS = 2  # the first only starts some of the state
# Largest difference of an update from the CPU's in float64, relative to the largest. Some methods divide by gradients.
TOLERANCE: Final = {torch.float32: 2e-3, torch.float64: 1e-7}
ROUNDED = 5e-3  # the same for sums of products of which TF32 rounds each
DRAWS = 1 << 18
DEVIATIONS = 6.0  # how many standard errors a moment of the noise may be off
SEED = 2**60 + 3

METHODS: Final[Mapping[str, Callable[[nn.Module], Optimizer]]] = {
    "VOGN": lambda model: VOGN(model, data_size=100, tempering=POINT),
    "OGN": lambda model: OGN(model, data_size=100),
    "IVON": lambda model: IVON(model, data_size=100, tempering=POINT),
    "KFAC": lambda model: KFAC(model, data_size=100),
    "NoisyKFAC": lambda model: NoisyKFAC(model, data_size=100, tempering=POINT),
    "BayesByBackprop": lambda model: BayesByBackprop(model, data_size=100, initial_log_variance=-50.0),
}


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    good: bool


class Timing(NamedTuple):
    """Seconds of a step, the median of several that took turns."""

    network: str
    adam: float
    vogn: float
    steps: int

    @property
    def ratio(self) -> float:
        return self.vogn / self.adam


class Sequences(nn.Module):
    """Layers on (M, T, d), as transformers have them."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(x).mean(1))
        return out


def small_network() -> nn.Module:
    """Convolutions, BatchNorm and linear layers. A bias before a norm has a gradient of rounding errors alone."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(54, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


def findings(device: torch.device) -> Iterator[Finding]:
    """All that is checked, one after the other."""
    yield from noise(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield guarded(f"sums of squares in {short(dtype)}", lambda: sums(device, dtype))  # noqa: B023
    types = [torch.float32] if device.type == "mps" else [torch.float32, torch.float64]
    for name, build in METHODS.items():
        for dtype in types:
            yield guarded(f"{name}, a step in {short(dtype)}", lambda: step(build, device, dtype))  # noqa: B023


def guarded(what: str, check: Callable[[], tuple[str, bool]]) -> Finding:
    """What a check finds; an error is a finding too."""
    try:
        return Finding(what, *check())
    except Exception as error:
        return Finding(what, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False)


def step(
    build: Callable[[nn.Module], Optimizer], device: torch.device, dtype: torch.dtype
) -> tuple[str, bool]:
    """How far the update is from that of plain torch on the CPU in float64."""
    with kernels.forced("off"):
        truth = updates(build, torch.device("cpu"), torch.float64)
    with exact_products(device):
        found = updates(build, device, dtype)
    size = max(float(own.abs().max()) for own in truth)
    error = max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True)) / size
    return f"differs by {error:.1e}", error <= TOLERANCE[dtype]  # False for NaN too


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """On a GPU torch's convolutions round float32 to TF32, which would hide what is wrong."""
    if device.type != "cuda":
        yield
        return
    backends: list[Any] = [torch.backends.cudnn.conv, torch.backends.cuda.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def sums(device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """Σr and Σr² of a convolution as torch is set, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(16, n, 12, 12, generator=generator).to(dtype) for n in (24, 40))
    geometry = (3, 3), (1, 1), (1, 1), (1, 1), 1
    with kernels.forced("off"):
        truth = weight_sums(x.double(), g.double(), *geometry)
    found = weight_sums(x.to(device), g.to(device), *geometry)
    error = max(float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True))
    return f"differs by {error:.1e}", error <= ROUNDED


def updates(
    build: Callable[[nn.Module], Optimizer], device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """What some steps change of each parameter."""
    generator = torch.Generator().manual_seed(0)
    model = small_network()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(max(1, p[0].numel())))
    x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8) % 4
    model, x, y = model.to(device, dtype), x.to(device, dtype), y.to(device)
    before = [p.detach().cpu().double().clone() for p in model.parameters()]  # a copy, on the CPU too
    optimizer = build(model)
    for _ in range(STEPS):
        one_step(model, optimizer, x, y)
    return [p.detach().cpu().double() - old for p, old in zip(model.parameters(), before, strict=True)]


def one_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def noise(device: torch.device) -> Iterator[Finding]:
    """Posteriors draw the CPU's numbers everywhere; what training draws is normal, and the CPU's under Triton."""
    yield guarded("noise of posteriors", lambda: same_noise(device))
    yield guarded("noise of training", lambda: normal_noise(device))


def same_noise(device: torch.device) -> tuple[str, bool]:
    here, there = torch.empty(DRAWS), torch.empty(DRAWS, device=device)
    with kernels.forced("off"):
        normal_(here, SEED, 1)
    normal_(there, SEED, 1)
    error = float((here - there.cpu()).abs().max())
    return f"differs by {error:.1e} from plain torch on the CPU", error <= 1e-5


def drawn(device: torch.device) -> Tensor:
    """ε as training draws it."""
    out = torch.zeros(DRAWS, device=device)
    sample_(out, torch.zeros_like(out), 1.0, 1.0, SEED, 1)
    return out.cpu().double()


def normal_noise(device: torch.device) -> tuple[str, bool]:
    """The first four moments, in standard errors; under Triton it is the noise of the C++ kernels besides."""
    draws = drawn(device)
    moments = (draws, draws**2 - 1, draws**3, draws**4 - 3)
    pairs = zip(moments, (1, 2, 15, 96), strict=True)  # and their variances
    off = max(abs(float(own.mean())) * math.sqrt(DRAWS / variance) for own, variance in pairs)
    text, good = f"moments within {off:.1f} standard errors", off <= DEVIATIONS
    status = kernels.status()
    if device.type == "cuda" and status.accelerator == "Triton" and status.enabled:
        error = float((draws - drawn(torch.device("cpu"))).abs().max())
        return f"{text}; differs from the CPU's by {error:.1e}", good and error <= 1e-5
    return text, good


# How long steps take


class Load(NamedTuple):
    """A network and a batch."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]


LOADS: Final[Mapping[bool, tuple[Load, ...]]] = {
    True: (  # on a GPU
        Load("MLP 784-512-512-10, batch 128", lambda: MLP([784, 512, 512, 10]), (128, 784)),
        Load("LeNet-5, batch 128", lambda: LeNet5(), (128, 3, 32, 32)),
        Load("transformer layer 256, batch 128 × 64", lambda: Sequences(256), (128, 64, 256)),
        Load("ResNet-18 width 64, batch 128", lambda: ResNet18(stem="cifar"), (128, 3, 32, 32)),
    ),
    False: (
        Load("MLP 784-256-256-10, batch 64", lambda: MLP([784, 256, 256, 10]), (64, 784)),
        Load("LeNet-5, batch 32", lambda: LeNet5(), (32, 3, 32, 32)),
        Load("transformer layer 64, batch 16 × 32", lambda: Sequences(64), (16, 32, 64)),
        Load("ResNet-18 width 16, batch 16", lambda: ResNet18(stem="cifar", width=16), (16, 3, 32, 32)),
    ),
}


def timings(device: torch.device, seconds: float) -> Iterator[Timing]:
    """Adam and VOGN on four networks, each for so many seconds at most and three steps at least."""
    for load in LOADS[device.type != "cpu"]:
        yield timing(load, device, seconds)


def timing(load: Load, device: torch.device, seconds: float) -> Timing:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(load.shape, generator=generator).to(device),
        (torch.arange(load.shape[0]) % 10).to(device),
    )
    models = [load.network().to(device) for _ in range(2)]
    optimizers: list[Any] = [Adam(models[0].parameters(), 1e-4), VOGN(models[1], data_size=10_000)]
    taken: list[list[float]] = [[], []]
    for k in range(2):  # compilers, caches and the state of optimisers
        for _ in range(2):
            one_step(models[k], optimizers[k], x, y)
    end = time.perf_counter() + seconds
    while len(taken[0]) < 3 or (time.perf_counter() < end and len(taken[0]) < 50):
        for k in range(2):
            wait_for(device)
            begin = time.perf_counter()
            one_step(models[k], optimizers[k], x, y)
            wait_for(device)
            taken[k].append(time.perf_counter() - begin)
    return Timing(load.name, statistics.median(taken[0]), statistics.median(taken[1]), len(taken[0]))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
