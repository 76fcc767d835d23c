"""A cost model of training over many processes, fitted on 1, 2 and 4 of them: `python -m benchmarks.scaling`.

A step of P processes with m examples each costs

    t = a + b·m  +  l + 2(P − 1)/P · bytes / W          compute, fitted on one process; message, fitted on 2 and 4

(a ring all-reduce of the message: VOGN's has two numbers a parameter, Adam's one). Printed: the fit, what it predicts
for steps that were not used for the fit beside what those take, and the arithmetic for the paper's 128 GPUs and for
1,024, whose inputs are the published epochs and networks' bandwidths, not measurements of ours.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import credo
from benchmarks.ranks import Ranks
from credo.models import ResNet18

BATCHES, RANKS, SHARE = (8, 16, 32, 64), (2, 4), 32
MESSAGES = (100_000, 700_000, 1_400_000, 5_600_000)  # float32 numbers; ResNet-18 w16 has 0.7 M parameters
CORES = os.cpu_count() or 1
Step = Callable[[], object]


def make_step(method: str, examples: int, ddp: bool = False) -> Step:
    torch.manual_seed(0)
    model = ResNet18(stem="cifar", width=16)
    x, y = torch.randn(examples, 3, 32, 32), torch.randint(0, 10, (examples,))
    if method == "vogn":
        vogn = credo.VOGN(model, data_size=50_000, lr=1e-9)

        def closure() -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return lambda: vogn.step(closure)
    net: nn.Module = DistributedDataParallel(model) if ddp else model
    adam = torch.optim.Adam(model.parameters(), lr=1e-9)

    def step() -> None:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()

    return step


def median_seconds(steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Of `rounds` turns after three of warm-up; among several ranks all start a step together."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 3):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own[3:]) for name, own in times.items()}


@dataclass(frozen=True)
class Line:
    """seconds = start + slope · size"""

    start: float
    slope: float

    def __call__(self, size: float) -> float:
        return self.start + self.slope * size

    @staticmethod
    def through(points: list[tuple[float, float]]) -> "Line":
        """Least squares of *relative* errors: the points span two orders of magnitude."""
        x = torch.tensor([[1.0, size] for size, _ in points], dtype=torch.float64)
        y = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
        solution = torch.linalg.lstsq(x / y[:, None], torch.ones(len(points), 1, dtype=torch.float64))
        return Line(*(float(value) for value in solution.solution))


def messages_and_steps() -> Callable[[], tuple[dict[int, float], dict[str, float]]]:
    """Bytes → seconds of an all-reduce, and whole steps; on every rank alike."""
    flats = {4 * numbers: torch.zeros(numbers) for numbers in MESSAGES}
    messages = {str(size): partial(dist.all_reduce, flat) for size, flat in flats.items()}
    steps = {"VOGN": make_step("vogn", SHARE), "DDP Adam": make_step("adam", SHARE, ddp=True)}

    def measured() -> tuple[dict[int, float], dict[str, float]]:
        found = median_seconds(messages, 20)
        return {int(size): seconds for size, seconds in found.items()}, median_seconds(steps, 20)

    return measured


def fitted_compute() -> dict[str, Line]:
    points: dict[str, list[tuple[float, float]]] = {"VOGN": [], "DDP Adam": []}
    for examples in BATCHES:
        steps = {"VOGN": make_step("vogn", examples), "DDP Adam": make_step("adam", examples)}
        for name, seconds in median_seconds(steps, 15).items():
            points[name].append((examples, seconds))
    return {name: Line.through(own) for name, own in points.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    compute = fitted_compute()
    for name, line in compute.items():
        print(
            f"compute, {name}: {1e3 * line.start:.1f} ms + {1e3 * line.slope:.2f} ms an example", flush=True
        )
    parameters = sum(p.numel() for p in ResNet18(stem="cifar", width=16).parameters())
    sizes = {"VOGN": 8.0 * parameters, "DDP Adam": 4.0 * parameters}
    for ranks in RANKS:
        with Ranks(ranks, messages_and_steps) as processes:
            points, steps = processes()[0]
        share = 2 * (ranks - 1) / ranks
        message = Line.through([(share * size, seconds) for size, seconds in points.items()])
        print(
            f"{ranks} ranks, message: {1e3 * message.start:.2f} ms + bytes / {1e-9 / message.slope:.2f} GB/s"
        )
        crowd = max(1.0, ranks / CORES)  # processes that share a core take turns
        for name, seconds in steps.items():
            guess = crowd * compute[name](SHARE) + message(share * sizes[name])
            print(
                f"  {name}, {SHARE} examples a rank: {1e3 * seconds:.0f} ms, model {1e3 * guess:.0f} ms",
                flush=True,
            )
    arithmetic()


IMAGES, BATCH, PARAMETERS = 1_281_167, 4096, 11_689_512  # ImageNet, the paper's minibatch, ResNet-18
PUBLISHED = {"Adam": 44.0, "VOGN": 76.0}  # seconds an epoch on 128 GPUs
# VOGN's compute in units of Adam's: the range measured here, on CPUs (benchmarks/notebook/step_time.md)
COMPUTE = (1.0, 1.15)
BANDWIDTHS = (1.5e9, 12.5e9)  # bytes a second for each rank: shared 10 Gbit Ethernet, 100 Gbit InfiniBand


def arithmetic() -> None:
    """No measurement: the published step of Adam, our ratio of compute, and the extra bytes over a given network."""
    for ranks in (128, 1024):
        steps = IMAGES / (BATCH / 128 * ranks)
        adam = PUBLISHED["Adam"] / (IMAGES / BATCH)  # 32 examples a rank, whatever their number
        extra = [2 * (ranks - 1) / ranks * 4 * PARAMETERS / speed for speed in BANDWIDTHS]
        low, high = steps * (adam * COMPUTE[0] + extra[1]), steps * (adam * COMPUTE[1] + extra[0])
        print(
            f"{ranks} ranks, {steps:.0f} steps an epoch: Adam {steps * adam:.1f} s, VOGN {low:.1f} to {high:.1f} s"
        )
    print(f"published, 128 ranks: Adam {PUBLISHED['Adam']:.0f} s, VOGN {PUBLISHED['VOGN']:.0f} s")


if __name__ == "__main__":
    main()
