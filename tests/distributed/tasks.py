"""What the ranks of the tests do. Results are plain numpy arrays and numbers, which any process can read."""

import math
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo

EXAMPLES, STEPS = 12, 4
SHARES = ("equal", "unequal", "one example", "empty")


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (
            nn.Conv1d(2, 3, 2),
            nn.Flatten(),
            nn.Linear(9, 5),
            nn.Tanh(),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )
        return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, EXAMPLES)
    x = torch.randn(*shape, 2, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, shape, generator=generator)
    return list(zip(x, y, strict=True))


def optimizer_of(method: str, model: nn.Module, **options: Any) -> Any:
    return getattr(credo, method)(model, data_size=100, **options)


def shares(kind: str, size: int) -> list[slice]:
    """How the examples of a batch are divided among ranks."""
    cuts = {
        "equal": [round(k * EXAMPLES / size) for k in range(size + 1)],
        "unequal": [0, *(EXAMPLES - 2 * (size - k) for k in range(1, size)), EXAMPLES],
        "one example": [0, *(EXAMPLES - size + k for k in range(1, size)), EXAMPLES],
        "empty": [0, *([EXAMPLES] * size)],
    }[kind]
    return [slice(a, b) for a, b in pairwise(cuts)]


def train(
    rank: int, size: int, method: str, kind: str, options: dict[str, Any], form: str = "closure"
) -> dict[str, Any]:
    """Some steps on this rank's share of each batch; every rank begins with other weights than rank 0."""
    model = network(seed=rank)
    optimizer = optimizer_of(method, model, **options)
    own = shares(kind, size)[rank]
    losses = [STEP_BY[form](optimizer, model, x[own], y[own]) for x, y in batches()]
    return described(model, optimizer, losses)


def train_in_all_ways(
    rank: int, size: int, method: str, options: dict[str, Any], forms: tuple[str, ...]
) -> dict[tuple[str, str], dict[str, Any]]:
    """By the form of a step, and the kind of shares."""
    return {
        (form, kind): train(rank, size, method, kind, options, form)
        for form in forms
        for kind in (SHARES if size > 1 else ("equal",))
    }


def step_by_blocks(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor, parts: int = 1) -> None:
    """Several backward passes in a block are micro-batches; a rank without examples opens no block at all."""
    reduction = optimizer.settings["reduction"]
    for _ in range(optimizer.settings["mc_samples"] if len(x) else 0):
        with optimizer.sampled():
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.cross_entropy(model(inputs), targets, reduction="sum")
                (loss / (len(x) if reduction == "mean" else 1)).backward()
    optimizer.step()


def step_by_losses(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """A closure that leaves the backward pass to the optimiser."""
    return float(optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none")))


def one_step(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> float:
    reduction = optimizer.settings["reduction"]

    def closure() -> Tensor:
        if optimizer.settings.get("vectorized"):
            return F.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        loss.backward()
        return loss

    return float(optimizer.step(closure))


STEP_BY: dict[str, Any] = {
    "closure": one_step,
    "losses": step_by_losses,
    "blocks": step_by_blocks,
    "micro-batches": partial(step_by_blocks, parts=2),
}


def described(model: nn.Module, optimizer: Any, losses: list[float]) -> dict[str, Any]:
    posterior = optimizer.posterior()
    return {
        "mean": {name: np.array(p.detach().tolist()) for name, p in model.named_parameters()},
        "variance": {name: np.array(v.tolist()) for name, v in posterior.variance.items()},
        "losses": losses,
        "counters": dict(optimizer.counters),
    }


def train_with_nan(rank: int, size: int, method: str) -> dict[str, Any]:
    """The second step has a NaN on the last rank only."""
    model = network()
    optimizer = optimizer_of(method, model)
    own = shares("equal", size)[rank]
    for step, (x, y) in enumerate(batches()):
        x = x * math.nan if step == 1 and rank == size - 1 else x
        one_step(optimizer, model, x[own], y[own])
    return described(model, optimizer, [])


def empty_after_nan(rank: int, size: int, options: dict[str, Any]) -> dict[str, int]:
    """A step of NaN, which is refused and leaves NaN in `.grad`; then one in which the last rank has no examples."""
    model = network()
    optimizer = optimizer_of("VOGN", model, **options)
    (x, y), (others, labels) = batches()[:2]
    one_step(optimizer, model, x * math.nan, y)
    if rank == size - 1:
        optimizer.step()
    else:
        one_step(optimizer, model, others, labels)
    return dict(optimizer.counters)


def noises(rank: int, size: int, method: str, options: dict[str, Any]) -> list[float]:
    """The sample that this rank sees in its second step, as distances from the mean."""
    model = network()
    optimizer = optimizer_of(method, model, **options)
    x, y = batches()[0]
    one_step(optimizer, model, x, y)
    mean = [p.detach().clone() for p in model.parameters()]
    with optimizer.sampled():
        sample = [p.detach().clone() for p in model.parameters()]
    return torch.cat([(w - m).flatten() for w, m in zip(sample, mean, strict=True)]).tolist()


def build_differently(rank: int, size: int, what: str) -> str:
    """Builds an optimiser that differs on the last rank; what it says about it."""
    odd = rank == size - 1
    model = nn.Linear(3, 4 if odd and what == "shape" else 2)
    model = model.double() if odd and what == "dtype" else model
    method = credo.OGN if odd and what == "method" else credo.VOGN
    numbers = {
        "lr": 0.5 if odd and what == "lr" else 0.1,
        "data_size": 60 if odd and what == "data_size" else 50,
    }
    try:
        method(model, **numbers)
    except credo.errors.InvalidValue as error:
        return str(error)
    return "built"


def build_synchronised(rank: int, size: int, everywhere: bool) -> list[str]:
    """What each method says of a model with SyncBatchNorm, on all ranks or on the last one only."""
    said = []
    for method in ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop"):
        model: nn.Module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        if everywhere or rank == size - 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        try:
            optimizer_of(method, model)
        except credo.errors.CredoError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def fail_on_one(rank: int, size: int) -> str:
    """An exception on one rank before its step: the others wait no longer than the timeout, and keep the mean."""
    model = network()
    optimizer = optimizer_of("VOGN", model)
    x, y = batches()[0]
    one_step(optimizer, model, x, y)
    mean = [p.detach().clone() for p in model.parameters()]
    if rank == size - 1:
        raise ZeroDivisionError("a loader failed on this rank")
    try:
        one_step(optimizer, model, x, y)
    except RuntimeError:
        intact = all(torch.equal(p, m) for p, m in zip(model.parameters(), mean, strict=True))
        return "mean in place" if intact else "mean lost"
    return "stepped"


def train_in_groups(
    rank: int, size: int, method: str, mc_groups: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The ranks of a group read the same share, and each has its own noise."""
    model = network()
    optimizer = optimizer_of(method, model, mc_groups=mc_groups, **options)
    share, count = credo.distributed.data_share(mc_groups)
    own = shares("equal", count)[share]
    losses = [one_step(optimizer, model, x[own], y[own]) for x, y in batches()]
    return described(model, optimizer, losses)


def train_for_many(method: str, samples: int, options: dict[str, Any]) -> dict[str, Any]:
    """One process whose samples of a step are those that as many ranks would have drawn."""
    model = network()
    optimizer = optimizer_of(method, model, mc_samples=samples, **options)

    def stream() -> int:
        step, rank = divmod(optimizer.counters["draws"], samples)
        return rank << 48 | step

    with patch.object(optimizer, "_stream", stream):
        losses = [one_step(optimizer, model, x, y) for x, y in batches()]
    return described(model, optimizer, losses)


def averaged_buffers(rank: int, size: int) -> list[float]:
    layer = nn.BatchNorm1d(2)
    layer.running_mean.fill_(rank)
    layer.num_batches_tracked.fill_(10 + rank)
    credo.distributed.average_buffers(layer)
    return [*layer.running_mean.tolist(), float(layer.num_batches_tracked)]


def gradients(rank: int, size: int, seeds: int) -> list[list[float]]:
    """ĝ of one batch at a sample of every rank, for many seeds."""
    model, (x, y) = network(), batches()[0]
    mean, found = [p.detach().clone() for p in model.parameters()], []
    for seed in range(seeds):
        optimizer = optimizer_of("VOGN", model, lr=1e-12, initial_curvature=1e-2, damping=1e-2, seed=seed)
        one_step(optimizer, model, x, y)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist())
        for p, start in zip(model.parameters(), mean, strict=True):
            p.data.copy_(start)
    return found
