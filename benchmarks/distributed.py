"""What a step of many processes costs: `python -m benchmarks.distributed [--processes 2] [--rounds 12]`.

Each contender has processes of its own, of one thread, with its share of the batch: in one process what one leaves to
the C library's memory is another's gain or loss. They take turns, step by step in a new order each round, so a slow
spell of the machine hits all of them. Times are until the slowest rank is done. The baseline is what people
use: DistributedDataParallel, which adds up during the backward pass, and Adam, constructors untouched; "fused"
is the fastest that torch has, and leaves buffers where they are, as ours do. "no message" is VOGN with half the batch
that asks nobody: what is between it and VOGN is the price of adding up.
"""

import argparse
import inspect
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import credo
from benchmarks.cases import CASES, Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE
from benchmarks.ranks import Ranks
from benchmarks.timing import quartiles
from credo.distributed import ALONE
from credo.kernels.scratch import expect_large_blocks

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


def ddp_adam_keeping(problem: Problem) -> Step:
    """With the C library told to keep freed memory, as credo's optimisers tell it: nobody does that by hand."""
    expect_large_blocks()
    return ddp_adam(fused=False)(problem)


def without_message(problem: Problem) -> Step:
    with (
        patch("credo.optim.base.world", lambda: ALONE),
        patch("credo.distributed.agreement.world", lambda: ALONE),
    ):
        return ours("VOGN")(problem)


CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    BASELINE: ddp_adam(fused=False),
    "DDP Adam, fused": ddp_adam(fused=True),
    "DDP Adam, memory kept": ddp_adam_keeping,
    "VOGN": ours("VOGN"),
    "VOGN, sharded": ours("VOGN", sharded=True),
    "VOGN, no message": without_message,
    "IVON": ours("IVON"),
}


def prepared(case_name: str, contender: str) -> Callable[[], float]:
    """The seconds of one step, until the slowest rank is done; on every rank alike."""
    case = next(case for case in CASES if case.name == case_name)
    step = CONTENDERS[contender](replace(case, batch=case.batch // dist.get_world_size()).problem())
    for _ in range(WARM_UP):
        step()

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    return seconds


def measure(case: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Contender → seconds of its steps."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        crews = {name: stack.enter_context(Ranks(size, prepared, case, name)) for name in CONTENDERS}
        for _ in range(rounds):
            for name in order.sample(list(crews), len(crews)):
                times[name].append(crews[name]()[0])
    return times


def report(title: str, size: int, times: dict[str, list[float]]) -> None:
    print(f"{title} in all, {size} processes of one thread; {len(times[BASELINE])} rounds")
    for name, own in times.items():
        ratios = [mine / base for mine, base in zip(own, times[BASELINE], strict=True)]
        low, middle, high = quartiles(ratios)
        print(f"{name:22} {statistics.median(own) * 1e3:8.1f} ms   {middle:.3f} [{low:.3f}, {high:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--case", default="resnet18-w16", choices=[case.name for case in CASES])
    options = parser.parse_args()
    case = next(case for case in CASES if case.name == options.case)
    report(case.title, options.processes, measure(case.name, options.processes, options.rounds))


if __name__ == "__main__":
    main()
