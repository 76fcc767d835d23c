"""Many weight samples a step: vectorised, in slices, and one after the other.

    python -m benchmarks.samples [words of the cases' titles]

In units of a plain forward + backward, of a step of torch's Adam, and of a VOGN step with one sample.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.models import MLP, LeNet5

Step = Callable[[], object]


def steps_for(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Step]:
    def losses() -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def plain() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    adam = torch.optim.Adam(model.parameters(), lr=1e-9)

    def adam_step() -> None:
        plain()
        adam.step()

    def vogn(**options: object) -> Step:
        optimizer = credo.VOGN(model, lr=1e-9, data_size=50_000, initial_curvature=1.0, **options)
        return lambda: optimizer.step(losses)

    def bbb(**options: object) -> Step:
        optimizer = credo.BayesByBackprop(model, lr=1e-9, data_size=50_000, **options)
        return lambda: optimizer.step(losses)

    paper = {"mc_samples": 10, "convolution_samples": 1}
    return {
        "forward + backward": plain,
        "Adam": adam_step,
        "VOGN, one sample": vogn(),
        "K = 8, one after the other": vogn(mc_samples=8),
        "K = 8, vectorised": vogn(mc_samples=8, vectorized=True),
        "K = 10, vectorised": vogn(mc_samples=10, vectorized=True),
        "2 slices": vogn(mc_slices=2),
        "8 slices": vogn(mc_slices=8),
        "32 slices": vogn(mc_slices=32),
        "BBB, one sample": bbb(),
        "BBB, K = 10, one after the other": bbb(mc_samples=10),
        "BBB, K = 10, vectorised": bbb(mc_samples=10, vectorized=True),
        "BBB, K = 10, 1 for convolutions": bbb(vectorized=True, **paper),
    }


def measured(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for k in range(rounds + 3):
        for name, step in steps.items():
            step()  # after another contender caches and freed memory are its own, in training they are not
            start = time.perf_counter()
            step()
            if k >= 3:
                times[name].append(time.perf_counter() - start)
    gc.enable()
    return times


def paired(times: list[float], baseline: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


def main() -> None:
    cases = {
        "MLP 784-100-100-10, batch 256": (MLP((784, 100, 100, 10)), torch.randn(256, 784), 100),
        "LeNet-5, batch 16": (LeNet5(), torch.randn(16, 3, 32, 32), 60),
        "LeNet-5, batch 128": (LeNet5(), torch.randn(128, 3, 32, 32), 15),
    }
    for title, (model, x, rounds) in cases.items():
        if not all(word in title for word in sys.argv[1:]):
            continue
        print(title)
        times = measured(steps_for(model, x, torch.randint(0, 10, (len(x),))), rounds)
        units = [times[name] for name in ("forward + backward", "Adam", "VOGN, one sample")]
        for name, own in times.items():
            print(f"  {name:32}", *(f"{paired(own, unit):6.2f}" for unit in units))


if __name__ == "__main__":
    main()
