"""`credo doctor`: is credo right on this machine, and how fast? One table, to be pasted into an issue."""

import platform
import sys
import time
from collections.abc import Iterator

import torch

from credo import kernels
from credo.cli.app import VERSION
from credo.cli.exits import FAILED, OK
from credo.cli.launch import device_of_rank, require_one_process
from credo.experiments import checkup

SECONDS = 6.0  # for the steps of a network


def doctor(device: str | None, quick: bool) -> int:
    require_one_process("credo doctor")
    begin = time.perf_counter()
    where = torch.device(device_of_rank(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    say("| what | found | |", "|---|---|---|")
    for name, value in facts(where):
        say(f"| {name} | {value} | |")
    bad, known = 0, kernels.status().on_the_gpu
    for finding in checkup.findings(where):
        bad += not finding.good
        say(f"| {finding.what} | {finding.found} | {'ok' if finding.good else '**wrong**'} |")
    if (now := kernels.status().on_the_gpu) != known:  # a program could not be compiled
        say(f"| kernels on a GPU, after this | {now} | |")
    if not quick:
        say("", "| a step of | Adam | VOGN | VOGN / Adam | steps |", "|---|---:|---:|---:|---:|")
        for own in checkup.timings(where, SECONDS):
            times = f"{own.adam * 1e3:.2f} ms | {own.vogn * 1e3:.2f} ms | {own.ratio:.2f}"
            say(f"| {own.network} | {times} | {own.steps} |")
    say("", f"{time.perf_counter() - begin:.0f} seconds. {verdict(bad)}")
    return FAILED if bad else OK


def facts(device: torch.device) -> Iterator[tuple[str, str]]:
    status = kernels.status()
    yield "credo", VERSION
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, {status.threads} threads"
    yield "device", name_of(device)
    yield (
        "kernels on the CPU",
        f"{'C++ ' + status.instruction_set if status.enabled else 'plain torch'}; {status.reason}",
    )
    yield "kernels on a GPU", status.on_the_gpu


def name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    own = torch.cuda.get_device_properties(device)
    return f"{device}: {own.name}, capability {own.major}.{own.minor}, {own.total_memory >> 20} MB"


def verdict(bad: int) -> str:
    if bad:
        return f"{bad} wrong: please open an issue with the table above."
    return "All is right. Paste the table into an issue to tell how fast credo is on your machine."


def say(*lines: str) -> None:
    print("\n".join(lines))
    sys.stdout.flush()
