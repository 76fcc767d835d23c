"""Ranks that stay: a group of processes that takes one task after the other, because starting one costs a second."""

import atexit
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

from tests.distributed.processes import PATIENCE, PRELOADED, RankFailed

TIMEOUT = timedelta(seconds=100)
_crews: dict[int, "Crew"] = {}


def together(size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
    """As `on_ranks`, for tasks that leave their processes as they were; a failure ends the crew, and raises."""
    crew = _crews.get(size) or _crews.setdefault(size, Crew(size))
    try:
        return crew.run(task, args)
    except BaseException:
        _crews.pop(size).end()
        raise


class Crew:
    def __init__(self, size: int):
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            job = (rank, size, Path(self._folder.name) / "store", theirs)
            self._processes.append(context.Process(target=_work, args=job, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(mine)

    def run(self, task: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((task, args))
        results = [self._result(pipe) for pipe in self._pipes]
        if failures := [value for kind, value in results if kind != "done"]:
            raise RankFailed("\n".join(failures))
        return [value for _, value in results]

    def _result(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv() if pipe.poll(PATIENCE) else ("failed", "no answer")
        except (EOFError, ConnectionError):
            return "failed", "died"

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(rank: int, size: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", task(rank, size, *args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


@atexit.register
def _end_all() -> None:
    while _crews:
        _crews.popitem()[1].end()
