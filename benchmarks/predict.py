"""How long 32 samples take, vectorised and looped, side by side in interleaved rounds.

    python -m benchmarks.predict [threads]

`separate` is what one would write by hand: draw, functional_call, softmax, 32 times over. `forwards` is 32
forwards of the model with its own weights, which draws nothing and answers nothing. Ratios are to `separate`, but for
the last column: `predict` to the same call with `vectorise=False`, the plain loop, which it must not exceed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from credo.models import MLP, AlexNet, LeNet5, ResNet18
from credo.posterior import DiagonalPosterior
from credo.predict import predict

SAMPLES = 32
ROUNDS, SECONDS = 15, 5.0
Run = Callable[[], object]

CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = [
    ("MLP 784-100-100-10", MLP, (784,), (1, 8, 32, 128, 512)),
    ("LeNet-5", LeNet5, (3, 32, 32), (1, 8, 32, 128)),
    ("AlexNet", AlexNet, (3, 32, 32), (1, 32)),
    ("ResNet-18 w16", lambda: ResNet18(width=16), (3, 32, 32), (1, 8)),
]


def contenders(model: nn.Module, x: Tensor) -> dict[str, Run]:
    mean = dict(model.named_parameters())
    posterior = DiagonalPosterior(mean, {name: torch.full_like(p, 1e-4) for name, p in mean.items()})

    @torch.no_grad()
    def separate() -> Tensor:
        g = torch.Generator().manual_seed(0)
        answers = (functional_call(model, posterior.sample(g), (x,)).softmax(-1) for _ in range(SAMPLES))
        return torch.stack(list(answers)).mean(0)

    @torch.no_grad()
    def forwards() -> list[Tensor]:
        return [model(x) for _ in range(SAMPLES)]

    return {
        "separate": separate,
        "forwards": forwards,
        "predict": lambda: predict(model, posterior, x, samples=SAMPLES),
        "loop": lambda: predict(model, posterior, x, samples=SAMPLES, vectorise=False),
    }


def interleaved(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Seconds of every round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + SECONDS
    for number in range(ROUNDS + 2):  # the first two warm up
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number > 1:
                times[name].append(time.perf_counter() - start)
        if number > 3 and time.perf_counter() > end:
            break
    return times


def paired(times: dict[str, list[float]], name: str, baseline: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def rows() -> Iterator[str]:
    for name, make, shape, sizes in CASES:
        model = make().eval()
        for size in sizes:
            times = interleaved(
                contenders(model, torch.randn(size, *shape, generator=torch.Generator().manual_seed(1)))
            )
            milliseconds = statistics.median(times["separate"]) * 1e3
            ratios = " ".join(f"{paired(times, k, 'separate'):8.2f}" for k in ("forwards", "predict"))
            yield f"{name:20} {size:5} {milliseconds:9.1f} ms {ratios} {paired(times, 'predict', 'loop'):10.2f}"


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(f"{'model':20} {'batch':>5} {'separate':>12} {'forwards':>8} {'predict':>8} {'vs loop':>10}")
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
