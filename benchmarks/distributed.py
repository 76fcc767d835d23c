"""What a step of many processes costs: `python -m benchmarks.distributed [--processes 2] [--rounds 12]`.

Each process has one thread, its share of the batch, and all contenders; they take turns in the same order everywhere,
so a slow spell of the machine hits all of them. Times are until the slowest rank is done. The baseline is what people
use: DistributedDataParallel, which adds up during the backward pass, and Adam, constructors untouched; "fused"
is the fastest that torch has, and leaves buffers where they are, as ours do. "no message" is VOGN with half the batch
that asks nobody: what is between it and VOGN is the price of adding up.
"""

import argparse
import inspect
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import credo
from benchmarks.cases import CASES, Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE
from benchmarks.timing import quartiles
from credo.distributed import ALONE

Step = Callable[[], object]
BASELINE = "DDP Adam"
WARM_UP = 2
# Torch has been renaming this option.
_options = inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {
    next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _options): False
}


def ddp_adam(*, fused: bool) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        model = DistributedDataParallel(problem.model, **(NO_BUFFERS if fused else {}))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=fused or None)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(problem.x), problem.y).backward()
            optimizer.step()

        return step

    return prepare


def ours(method: str, **options: Any) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        optimizer = getattr(credo, method)(problem.model, lr=LEARNING_RATE, data_size=DATA_SIZE, **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = problem.loss()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    return prepare


def without_message(problem: Problem) -> Step:
    with patch("credo.optim.base.world", lambda: ALONE), patch("credo.optim.joining.world", lambda: ALONE):
        return ours("VOGN")(problem)


CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    BASELINE: ddp_adam(fused=False),
    "DDP Adam, fused": ddp_adam(fused=True),
    "VOGN": ours("VOGN"),
    "VOGN, sharded": ours("VOGN", sharded=True),
    "VOGN, no message": without_message,
    "IVON": ours("IVON"),
}


def work(rank: int, size: int, store: str, case: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found = next(c for c in CASES if c.name == case)
    steps = {
        name: prepare(replace(found, batch=found.batch // size).problem())
        for name, prepare in CONTENDERS.items()
    }
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            times[name].append(seconds(steps[name]))
    if rank == 0:
        report(found.title, size, times)
    dist.destroy_process_group()


def seconds(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def report(title: str, size: int, times: dict[str, list[float]]) -> None:
    print(f"{title} in all, {size} processes of one thread; {len(times[BASELINE])} rounds")
    for name, own in times.items():
        ratios = [mine / base for mine, base in zip(own, times[BASELINE], strict=True)]
        low, middle, high = quartiles(ratios)
        print(f"{name:18} {statistics.median(own) * 1e3:8.1f} ms   {middle:.3f} [{low:.3f}, {high:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--case", default="resnet18-w16", choices=[case.name for case in CASES])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        job = (options.processes, str(Path(folder) / "store"), options.case, options.rounds)
        multiprocessing.spawn(work, job, options.processes)


if __name__ == "__main__":
    main()
