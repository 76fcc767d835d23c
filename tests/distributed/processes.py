"""Runs a function on several ranks, each a process of its own with gloo, and cleans up whatever happens."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "torch",
    "torch._dynamo",  # which torch imports with the first optimiser
    "credo",
    "credo.cli.run",
    "sklearn.datasets",
    "torch.utils.tensorboard",
    "torch.distributed.fsdp",
    "tests.distributed.tasks",
    "tests.distributed.fully_sharded_tasks",
    "tests.distributed.fully_sharded_refusals",
    "tests.distributed.sharded_tasks",
    "tests.distributed.exchanges",
    "tests.experiments.ranked",
]  # once, in the server that the ranks are forked from
PATIENCE = 120.0  # seconds a rank may take before it is given up


class RankFailed(Exception):
    """What a rank raised, as text."""


def on_ranks(
    size: int, task: Callable[..., Any], *args: Any, timeout: float = 100.0, joined: bool = True
) -> list[Any]:
    """task(rank, size, *args) on every rank; the results in the order of ranks. A failure becomes a RankFailed.

    joined: False leaves it to the task to initialise the process group.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            job = (rank, size, Path(folder) / "store", timeout if joined else None, task, args, sender)
            process = context.Process(target=_work, args=job, daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            return [_result(receiver) for receiver in receivers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(receiver: Connection) -> Any:
    try:
        if not receiver.poll(PATIENCE):
            return RankFailed("no answer")
        kind, value = receiver.recv()
    except EOFError:
        return RankFailed("died")
    return value if kind == "done" else RankFailed(value)


def _work(
    rank: int,
    size: int,
    store: Path,
    timeout: float | None,
    task: Callable[..., Any],
    args: Any,
    sender: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        if timeout is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        sender.send(("done", task(rank, size, *args)))
        if timeout is not None:
            dist.barrier()
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
