"""Processes of one start find each other, whatever an earlier start has left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from credo.cli.launch import met
from credo.errors import RankLost

PATIENCE = timedelta(seconds=20)


def meet(store: Any, size: int) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: met(store, rank, size, PATIENCE), range(size)))


def test_every_start_has_a_store_of_its_own() -> None:
    shared = dist.HashStore()
    first = meet(shared, 3)
    first[1].set("address", "of the dead")
    assert first[2].get("address") == b"of the dead"
    for size in (3, 2, 4):  # others may take part the next time
        again = meet(shared, size)
        assert not any(store.check(["address"]) for store in again)
        again[-1].set("here", "now")
        assert all(store.get("here") == b"now" for store in again)


def test_one_process_waits_for_nobody() -> None:
    assert not met(dist.HashStore(), 0, 1, PATIENCE).check(["anything"])


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()
    store.set("credo/hello/1", "left by an earlier start")
    with pytest.raises(RankLost, match=r"ranks \[1\] to start"):
        met(store, 0, 2, timedelta(seconds=0.05))
