"""How the processes of one start find each other in a store that still holds what those of an earlier start have left.

After a worker has died torchrun starts all of them again, with the same store: the addresses of the dead are still in
it. So every process brings a token that nobody has had before. Rank 0 answers to each token it sees, stale ones too,
with its own, which names this start; only the living answer back.
"""

import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from credo.errors import RankLost

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
