"""What the ranks do with models under `fully_shard`. Results are numpy arrays and numbers, for any process to read."""

import contextlib
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import tasks
from tests.distributed.fully_sharded_models import PROBLEMS, Batch, batches, model_of, whole


def step(optimizer: Any, model: nn.Module, batch: Batch, problem: str, form: str) -> float | None:
    loss, reduction, (x, y) = PROBLEMS[problem].loss, optimizer.settings["reduction"], batch
    if form == "blocks":
        for _ in range(optimizer.settings["mc_samples"]):
            with optimizer.sampled():
                loss(model(x), y, reduction=reduction).backward()
        optimizer.step()
        return None
    if form == "micro-batches":
        for _ in range(optimizer.settings["mc_samples"]):
            with optimizer.sampled():
                for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                    part = loss(model(inputs), targets, reduction=reduction)
                    (part * (len(inputs) / len(x) if reduction == "mean" else 1)).backward()
        optimizer.step()
        return None

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y, reduction=reduction)
        value.backward()
        return value

    return float(optimizer.step(closure))


def described(optimizer: Any, losses: list[float | None]) -> dict[str, Any]:
    posterior = optimizer.posterior()
    return {
        "mean": {name: value.numpy() for name, value in posterior.mean.items()},
        "variance": {name: value.numpy() for name, value in posterior.variance.items()},
        "curvature": {name: value.numpy() for name, value in optimizer.curvature().items()}
        if hasattr(optimizer, "curvature")
        else {},
        "losses": losses,
        "buffers": {name: value.numpy() for name, value in posterior.buffers.items()},
        "counters": dict(optimizer.counters),
    }


def train(
    rank: int,
    size: int,
    sharded: bool,
    method: str,
    options: dict[str, Any],
    problem: str,
    form: str,
    kind: str,
) -> dict[str, Any]:
    model = model_of(problem, sharded)
    optimizer = tasks.optimizer_of(method, model, **options)
    own = tasks.shares(kind, size)[rank]
    losses = [step(optimizer, model, (x[own], y[own]), problem, form) for x, y in batches(problem)]
    return described(optimizer, losses)


def train_all(rank: int, size: int, sharded: bool, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(rank, size, sharded, *case) for case in cases]


def arrays(state: Any) -> Any:
    if isinstance(state, Tensor):
        return ("tensor", state.numpy())
    if isinstance(state, dict):
        return {key: arrays(value) for key, value in state.items()}
    return [arrays(value) for value in state] if isinstance(state, list) else state


def tensors(state: Any) -> Any:
    if isinstance(state, tuple) and len(state) == 2 and state[0] == "tensor":
        return torch.from_numpy(np.array(state[1]))
    if isinstance(state, dict):
        return {key: tensors(value) for key, value in state.items()}
    return [tensors(value) for value in state] if isinstance(state, list) else state


def run(
    rank: int,
    size: int,
    sharded: bool,
    method: str,
    options: dict[str, Any],
    first: int,
    steps: int,
    saved: Any = None,
) -> dict[str, Any]:
    """Steps `first` to `steps` of a run on "layers"; `saved` is what another run has returned."""
    model = model_of("layers", sharded)
    if saved is not None:
        load(model, tensors(saved["model"]))
    optimizer = tasks.optimizer_of(method, model, **options)
    if saved is not None:
        optimizer.load_state_dict(tensors(saved["optimizer"]))
    own = tasks.shares("unequal", size)[rank]
    losses = [
        step(optimizer, model, (x[own], y[own]), "layers", "closure")
        for x, y in batches("layers", steps)[first:]
    ]
    return {
        **described(optimizer, losses),
        "optimizer": arrays(optimizer.state_dict()),
        "model": arrays({name: whole(value) for name, value in model.state_dict().items()}),
    }


def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """By torch's own way to load whole tensors into a sharded model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state, options=options)


# ────────────────────────────────────────
# What users do around a step.


def clipped(rank: int, size: int, sharded: bool, where: str) -> dict[str, Any]:
    """Gradients are clipped between block and step, or in the closure: by torch, over all ranks."""
    model = model_of("layers", sharded)
    optimizer = tasks.optimizer_of("IVON", model)
    own, norms = tasks.shares("unequal", size)[rank], []

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms.append(float(whole(norm)))

    def closure(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip()
        return loss

    for x, y in batches("layers"):
        if where == "closure":
            optimizer.step(partial(closure, x[own], y[own]))
            continue
        with optimizer.sampled():
            F.cross_entropy(model(x[own]), y[own]).backward()
        clip()
        optimizer.step()
        model.zero_grad()
    return described(optimizer, norms)


def around_steps(rank: int, size: int, sharded: bool, method: str) -> dict[str, Any]:
    """Evaluations at the mean and looks at samples between steps, a scheduler, accumulation, a prior."""
    prior = tasks.optimizer_of("VOGN", model_of("layers", False)).posterior()
    model = model_of("layers", sharded)
    optimizer = tasks.optimizer_of(method, model, prior=prior)
    optimizer.accumulate(2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    own, seen = tasks.shares("unequal", size)[rank], []
    for k, (x, y) in enumerate(batches("layers", 6)):
        step(optimizer, model, (x[own], y[own]), "layers", "closure")
        with torch.no_grad():
            seen.append(float(model(x).square().sum()))
        if k % 2:
            with optimizer.sampled(), torch.no_grad():
                seen.append(float(model(x).square().sum()))
            scheduler.step()
    seen += [group.step_size for group in optimizer.diagnostics()]
    return described(optimizer, seen)


def waiting(rank: int, size: int, sharded: bool) -> dict[str, Any]:
    """`set_requires_gradient_sync(False)` but for the last backward pass of a block."""
    model: Any = model_of("layers", sharded)
    optimizer = tasks.optimizer_of("VOGN", model)
    own = tasks.shares("equal", size)[rank]
    for x, y in batches("layers"):
        parts = list(zip(x[own].chunk(2), y[own].chunk(2), strict=True))
        with optimizer.sampled():
            for k, (inputs, targets) in enumerate(parts):
                if sharded:
                    model.set_requires_gradient_sync(k + 1 == len(parts))
                (F.cross_entropy(model(inputs), targets, reduction="sum") / len(x[own])).backward()
        optimizer.step()
    return described(optimizer, [])


def checkpointed(rank: int, size: int, sharded: bool) -> dict[str, Any]:
    """The forward pass of a layer runs again in the backward pass."""
    model: Any = model_of("layers", sharded)
    optimizer = tasks.optimizer_of("VOGN", model)
    own = tasks.shares("unequal", size)[rank]
    for x, y in batches("layers"):

        def closure(x: Tensor = x[own], y: Tensor = y[own]) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if not hasattr(model[2], "_wrapped"):
            inner = model[2].forward
            model[2].forward = partial(torch.utils.checkpoint.checkpoint, inner, use_reentrant=False)
            model[2]._wrapped = True
        optimizer.step(closure)
    return described(optimizer, [])


def after_an_error(rank: int, size: int, sharded: bool) -> dict[str, Any]:
    """All ranks fail amid a closure; the means are as they were, and training goes on."""
    model = model_of("layers", sharded)
    optimizer = tasks.optimizer_of("VOGN", model)
    own = tasks.shares("equal", size)[rank]
    for k, (x, y) in enumerate(batches("layers")):
        if k == 1:
            before = [whole(p).detach().clone() for p in model.parameters()]

            def broken(x: Tensor = x[own]) -> Tensor:
                model(x).sum()
                raise ZeroDivisionError

            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(broken)
            same = [torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True)]
            assert all(same)
        step(optimizer, model, (x[own], y[own]), "layers", "closure")
    return described(optimizer, [])


def not_finite(rank: int, size: int, method: str) -> dict[str, Any]:
    """One rank has NaN in the second of three batches."""
    model = model_of("layers", True)
    optimizer = tasks.optimizer_of(method, model)
    own = tasks.shares("equal", size)[rank]
    for k, (x, y) in enumerate(batches("layers")):
        x = x * float("nan") if k == 1 and rank == size - 1 else x
        step(optimizer, model, (x[own], y[own]), "layers", "closure")
    return described(optimizer, [])


def own_memory_alone(method: str) -> tuple[int, int]:
    return _memory(method, False)


def own_memory(rank: int, size: int, method: str) -> tuple[int, int]:
    """Numbers in the optimiser's state after a step, and in the model."""
    return _memory(method, True)


def _memory(method: str, sharded: bool) -> tuple[int, int]:
    model = model_of("layers", sharded)
    optimizer = tasks.optimizer_of(method, model)
    x, y = batches("layers")[0]
    step(optimizer, model, (x, y), "layers", "closure")
    optimizer.posterior()
    tensors_of = [
        t
        for own in optimizer.state.values()
        for n, t in own.items()
        if isinstance(t, Tensor) and n != "scale"
    ]
    return sum(t.numel() for t in tensors_of if t.dim()), sum(p.numel() for p in model.parameters())


def example(rank: int, size: int) -> list[float]:
    from examples import fully_sharded

    return fully_sharded.main(epochs=2).sum(0).tolist()


# ────────────────────────────────────────
# DistributedDataParallel.


def wrapped(
    rank: int, size: int, inside: bool, method: str, options: dict[str, Any], forms: tuple[str, ...]
) -> list[dict[str, Any]]:
    """With a model inside the wrapper, or plain; shares differ, and one rank may have none."""
    found = []
    for form in forms:
        for kind in ("unequal", "empty"):
            few = kind == "empty" or form == "micro-batches"  # BatchNorm needs two examples
            model = model_of("layers" if few else "statistics", False)
            outer: Any = (
                nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if inside else model
            )
            optimizer = tasks.optimizer_of(method, outer, **options)
            own, losses = tasks.shares(kind, size)[rank], []
            for x, y in batches("layers"):
                losses.append(tasks.STEP_BY[form](optimizer, outer, x[own], y[own]))
            found.append(described(optimizer, losses))
    return found
