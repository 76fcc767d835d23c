"""Peak memory that a training step adds, each in a process of its own.

Resident memory at its highest over the first two steps, optimiser state included, minus what was resident
before the contender was prepared: network and batch exist by then, gradients do not.
"""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from benchmarks.cases import Case, Problem
from benchmarks.contender import Contender
from benchmarks.peers import ignore_warnings_of_peers
from benchmarks.registry import find_case, find_contender

STEPS = 2
SECONDS = 120
PRELOADED = [
    "benchmarks.memory",
    "backpack",
    "backpack.extensions",
    "opacus.grad_sample",
    "ivon",
    "torch._dynamo",
]


def peak_megabytes(case: Case, contender: Contender) -> float | None:
    """None where the contender raises or is killed for want of memory."""
    context = multiprocessing.get_context("forkserver")  # imports happen once, not once per measurement
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=report_peak, args=(case.name, contender.name, torch.get_num_threads(), sender)
    )
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


# names, because the callables of a case cannot be pickled
def report_peak(case: str, contender: str, threads: int, sender: Connection) -> None:
    ignore_warnings_of_peers()
    torch.set_num_threads(threads)
    try:
        sender.send(added_by(find_case(case).problem(), find_contender(contender)))
    except Exception:
        sender.send(None)


def added_by(problem: Problem, contender: Contender) -> float:
    start_the_libraries()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far
    before = status_megabytes("VmRSS")
    step = contender.prepare(problem).step
    for _ in range(STEPS):
        step()
    return status_megabytes("VmHWM") - before


def start_the_libraries() -> None:
    """Thread pools and code that is paged in on first use belong to nobody."""
    conv = nn.Conv2d(3, 8, 3)
    conv(torch.ones(8, 3, 16, 16)).sum().backward()


def status_megabytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(field + ":"))
    return int(kilobytes) / 1024
