"""Processes that stay: several ranks with gloo, one thread each, that do their work whenever they are told to."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch", "torch._dynamo", "credo"]  # once, in the server that the ranks are forked from
PATIENCE = 300.0  # seconds that an answer may take


class Ranks:
    """`prepare(*args)` on each of `size` processes makes the work; each call of this object has all of them do it.

        with Ranks(2, prepare, 64) as ranks:
            first, second = ranks()

    A rank that fails ends all, with an error here.
    """

    def __init__(self, size: int, prepare: Callable[..., Callable[[], Any]], *args: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            job = (rank, size, Path(self._folder.name) / "store", theirs, prepare, args)
            self._processes.append(context.Process(target=_work, args=job, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(mine)

    def __call__(self) -> list[Any]:
        """What the work returns, by rank."""
        for pipe in self._pipes:
            pipe.send(True)
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            if self._pipes[rank].poll(PATIENCE):
                return self._pipes[rank].recv()
        except EOFError:
            pass
        raise RuntimeError(f"rank {rank} has failed, or takes more than {PATIENCE} s; see its own message")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(
    rank: int,
    size: int,
    store: Path,
    pipe: Connection,
    prepare: Callable[..., Callable[[], Any]],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    work = prepare(*args)
    while pipe.recv():
        pipe.send(work())
