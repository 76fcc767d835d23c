"""What the ranks of the tests tell each other: tensors, errors, predictions. Results are plain numbers and texts."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import credo
from credo.distributed import gather, outcome_of_all, outcome_of_first, world
from credo.errors import IntegrityError, LockedError, RankLost
from tests.distributed.tasks import batches, network, one_step, optimizer_of


def gathered(rank: int, size: int) -> list[list[Any]]:
    """Each rank has other tensors, the last one none."""
    own = [
        torch.full((rank, 2), rank + 0.1, dtype=torch.float64),
        torch.tensor([True, rank > 0]),
        torch.tensor(rank, dtype=torch.int16),
        torch.tensor([float("nan"), float("-inf")], dtype=torch.bfloat16),
    ]
    found = gather(world(), [] if rank == size - 1 else own)
    assert gather(world(), []) == [[]] * size
    assert world().gather_texts("") == [""] * size
    return [[(str(t.dtype), tuple(t.shape), str(t.tolist())) for t in row] for row in found]


def outcomes(rank: int, size: int) -> dict[str, Any]:
    """How errors of one rank arrive at all of them."""

    class Peculiar(IntegrityError):
        pass

    def failing_on(failing: int, error: Exception) -> Callable[[], str]:
        def action() -> str:
            if rank == failing:
                raise error
            return f"value {rank}"

        return action

    cases = {
        "all well": lambda: outcome_of_all(world(), lambda: rank),
        "first well": lambda: outcome_of_first(world(), lambda: {"by": rank}),
        "locked on 0": lambda: outcome_of_first(world(), failing_on(0, LockedError("in use"))),
        "file on 1": lambda: outcome_of_all(world(), failing_on(1, FileNotFoundError("no such data"))),
        "own class": lambda: outcome_of_all(world(), failing_on(1, Peculiar("flipped"))),
        "bug": lambda: outcome_of_all(world(), failing_on(1, AssertionError())),
    }
    return {name: _ended(case) for name, case in cases.items()}


def _ended(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)


def network_of(seed: int, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(23, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (23,), generator=generator)


def _loader(x: Tensor, y: Tensor) -> Iterator[Any]:
    return ((x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5))


def predictions(rank: int, size: int, distributed: bool) -> dict[str, Any]:
    """By name: every field of a prediction, as nested lists."""
    model, dropping, (x, y) = network_of(0), network_of(1, dropout=0.4), inputs()
    posterior = credo.VOGN(model, data_size=100).posterior()
    more: dict[str, Any] = {"samples": 7, "seed": 5, "distributed": distributed}
    regression: dict[str, Any] = {**more, "task": "regression", "noise": 0.5}
    found = {
        "tensor": credo.predict(model, posterior, x, **more),
        "one example": credo.predict(model, posterior, x[:1], **more),
        "no example": credo.predict(model, posterior, x[:0], **more),
        "batch_size": credo.predict(model, posterior, x, batch_size=4, **more),
        "loader": credo.predict(model, posterior, _loader(x, y), **more),
        "samples": credo.predict(model, posterior, x, keep_samples=True, **more),
        "mean": credo.predict(model, "mean", x, **more),
        "dropout": credo.predict(dropping, credo.DropoutPosterior(dropping), _loader(x, y), **more),
        "regression": credo.predict(model, posterior, x, **regression),
        "regression loader": credo.predict(model, posterior, _loader(x, y), keep_samples=True, **regression),
    }
    return {
        name: {
            field: t.tolist() if isinstance(t, torch.Tensor) else t for field, t in vars(prediction).items()
        }
        for name, prediction in found.items()
    }


def bad_predictions(rank: int, size: int) -> list[Any]:
    """A batch that only rank 1 sees is bad; ranks have other numbers of batches."""
    model, (x, y) = network_of(0), inputs()
    wrong = [x[:5], x[:5, :3], x[5:]]
    few = list(_loader(x, y))[: 5 - rank]
    return [
        _ended(lambda: credo.predict(model, "mean", wrong, distributed=True)),
        _ended(lambda: credo.predict(model, "mean", few, distributed=True)),
    ]


def scores(rank: int, size: int) -> dict[str, float]:
    """Each rank has predicted its own part, of another size."""
    model, (x, y) = network_of(0), inputs()
    own = slice(0, 15) if rank == 0 else slice(15, None)
    here, strange = credo.predict(model, "mean", x[own]), credo.predict(model, "mean", 3 * x[own])
    return credo.evaluate(here, y[own], ood=strange, distributed=True)


def fault(rank: int, size: int, what: str, method: str = "VOGN", sharded: bool = False) -> dict[str, Any]:
    """Two good steps, then something happens to the last rank."""
    model, last = network(), rank == size - 1
    optimizer = optimizer_of(method, model, sharded=sharded)
    for x, y in batches()[:2]:
        one_step(optimizer, model, x, y)
    mean = [p.detach().clone() for p in model.parameters()]
    if last and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if last and what == "slow":
        time.sleep(4.5)
    if last and what == "fewer steps":
        return {"ended": "early"}
    if last and what == "another step":
        optimizer.counters["step"] = 7
    start = time.perf_counter()
    try:
        one_step(optimizer, model, *batches()[2])
    except (RankLost, credo.errors.CallOrderError) as error:
        ended = f"{type(error).__name__}: {error}"
    else:
        ended = "stepped"
    same = all(torch.equal(p, m) for p, m in zip(model.parameters(), mean, strict=True))
    return {"ended": ended, "seconds": time.perf_counter() - start, "mean in place": same}
