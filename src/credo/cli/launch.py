"""One command as several processes: what `torchrun` starts joins its group, and what failed first is told once.

A rank that fails leaves its message with the others' store. A rank that then waits in vain adds it to its own, and one
that fails with the same words keeps silent.

After a worker has died torchrun starts all of them again, with the same store: the addresses of the dead are still in
it. So every process brings a new token (`met`). Rank 0 answers to each token it sees, stale ones
too, with its own, which names this start; only the living answer back.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from credo.cli.exits import exit_code, message_of
from credo.errors import CallOrderError, InvalidValue, RankLost
from credo.experiments.stopping import Terminated

TIMEOUT: Final = 300.0  # seconds
ARRIVAL: Final = timedelta(minutes=10)  # until all processes have imported what they need
CAUSE: Final = "credo/cause"


@contextmanager
def process_group(timeout: float, device: str) -> Iterator[None]:
    """Inside, the processes that torchrun has started are one group; without torchrun nothing happens."""
    if not timeout > 0:
        raise InvalidValue(f"--timeout must be above 0 seconds, got {timeout:g}")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    store, rank = _joined(timeout, device)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        if rank:  # all ranks stop together, and the first says so
            raise SystemExit(exit_code(error)) from error
        raise
    except Exception as error:
        _tell(store, rank, error)
        raise
    finally:
        with suppress(RuntimeError):  # what is lost already need not be left in good order
            dist.destroy_process_group()


def device_of_rank(device: str) -> str:
    """The device that is asked for; with GPUs every process of a machine takes one."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InvalidValue(
            f"--device must be cpu, cuda or another device of torch's, got {device!r}"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidValue(f"--device is {device}, and torch finds no GPU; leave it out to train on the CPU")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def require_one_process(command: str) -> None:
    """Before a command that several processes would do over and over, in each other's way."""
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidValue(f"{command} is for one process; start it without torchrun")


def _joined(timeout: float, device: str) -> tuple[Any, int]:
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=ARRIVAL)))
    except ValueError as error:
        raise CallOrderError(
            f"RANK and WORLD_SIZE are set, but {error}. Start with: torchrun --nproc-per-node 2 -m credo run RECIPE"
        ) from error
    store = met(store, rank, size, ARRIVAL)
    store.set_timeout(timedelta(seconds=timeout))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as error:
        raise RankLost(f"rank {rank} could not reach the others: {error}") from error
    return store, rank


def _tell(store: Any, rank: int, error: Exception) -> None:
    """Raises in place of the error what is left to say: silence, if another rank has said it; or more, if it knows."""
    message = message_of(error) or ""
    first = _first_cause(store, f"{rank}:{message}")
    who, _, cause = first.partition(":")
    told = hasattr(error, "rank") or (cause == message and who != str(rank))
    code = exit_code(error)
    if told and code is not None:
        raise SystemExit(code) from error
    if isinstance(error, RankLost) and who != str(rank):
        raise RankLost(f"rank {who} failed first: {cause} (here: {message})") from error


def _first_cause(store: Any, own: str) -> str:
    """What the first rank to fail has left; the own cause where that was us, or where the store is gone."""
    try:
        return str(store.compare_set(CAUSE, "", own).decode())
    except RuntimeError:
        return own


PAUSE = 0.01  # seconds between looks


def met(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """A store of this start alone, once all ranks are there; its own timeouts count from now on."""
    token = secrets.token_hex(8)
    if rank == 0:
        _welcome_all(store, token, size, patience)
        return PrefixStore(token, store)
    store.set(f"credo/hello/{rank}", token)
    store.wait([f"credo/welcome/{token}"], patience)
    start = store.get(f"credo/welcome/{token}").decode()
    store.set(f"credo/{start}/{rank}", "here")
    store.wait([f"credo/{start}/begin"], patience)
    return PrefixStore(start, store)


def _welcome_all(store: Any, start: str, size: int, patience: timedelta) -> None:
    end, missing = time.monotonic() + patience.total_seconds(), set(range(1, size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"credo/hello/{rank}"]):
                token = store.get(f"credo/hello/{rank}").decode()
                store.set(f"credo/welcome/{token}", start)
        missing = {rank for rank in missing if not store.check([f"credo/{start}/{rank}"])}
        if missing and time.monotonic() > end:
            raise RankLost(f"rank 0 has waited {patience} for ranks {sorted(missing)[:8]} to start.")
        time.sleep(PAUSE if missing else 0)
    store.set(f"credo/{start}/begin", "")
