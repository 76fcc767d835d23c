"""What the input pipeline costs beside the steps that it feeds: CIFAR-10-size batches of 128 with pad-crop-flip.

python -m benchmarks.pipeline

The pixels are random numbers: the cost does not depend on them, and no download is needed.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from credo.data import Batches, Examples, Normalise, PadCropFlip
from credo.models import LeNet5, ResNet18

EXAMPLES, BATCH = 50_000, 128
SECONDS = 8.0  # for each network
PIPELINE_BLOCK = 20  # batches a measurement: one alone is too short for the clock
NORMALISE = Normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def pipeline(augmented: bool) -> Callable[[], object]:
    """Fetches one batch; epochs follow each other, so that shuffling is paid for too."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (EXAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.randint(10, (EXAMPLES,), generator=generator))
    augmentation = PadCropFlip(pad=4) if augmented else None
    batches = Batches(examples, BATCH, shuffle=True, augmentation=augmentation, normalise=NORMALISE)

    def endless() -> object:
        while True:
            yield from batches

    stream = iter(endless())  # type: ignore[call-overload]
    return lambda: next(stream)


def adam_step(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


def compare(fetch: Callable[[], object], step: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of a batch and of a step, and the median of their paired ratio, taking turns."""
    seconds_of(fetch, 50)
    seconds_of(step, 5)
    pairs = []
    end = time.perf_counter() + SECONDS / 2
    gc.disable()
    while time.perf_counter() < end or len(pairs) < 5:
        pairs.append((seconds_of(fetch, PIPELINE_BLOCK), seconds_of(step, 3)))
    gc.enable()
    batch, stepped = (statistics.median(times) for times in zip(*pairs, strict=True))
    return batch, stepped, statistics.median(one / two for one, two in pairs)


def main() -> None:
    networks = {
        "LeNet-5": (LeNet5(), "share of an epoch ≤ 5 %", lambda r: f"{100 * r / (1 + r):.1f} %"),
        "ResNet-18 w16": (ResNet18(width=16), "pipeline ≥ 20 times faster", lambda r: f"{1 / r:.0f} times"),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batches of {BATCH}, 3×32×32")
    for augmented in (False, True):
        fetch = pipeline(augmented)
        print(f"\n{'pad-crop-flip and normalise' if augmented else 'normalise only'}")
        for name, (model, bar, show) in networks.items():
            batch, step, ratio = compare(fetch, adam_step(model))
            print(
                f"  {name:14} batch {batch * 1e3:6.3f} ms, Adam step {step * 1e3:7.2f} ms: {show(ratio)}   (bar: {bar})"
            )


if __name__ == "__main__":
    main()
