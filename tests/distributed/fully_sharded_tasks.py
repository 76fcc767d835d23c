"""What the ranks do with models under `fully_shard`. Results are numpy arrays and numbers, for any process to read."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from tests.distributed import tasks

STEPS = 3
SHARES = ("equal", "unequal")
Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A language model: the embedding is the weight of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.RMSNorm(4)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        return self.head(self.norm(hidden + torch.tanh(self.mix(hidden)))).transpose(1, 2)


class Merging(nn.Module):
    """Positions become rows outside of the layer that is sharded by itself; they are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden.reshape(-1, 6)).view(len(x), -1, 3).transpose(1, 2)


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().double()


def derived() -> nn.Module:
    """Weights that are computed from parameters, and a last layer of one row: three of four ranks have none of it."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))
    return nn.Sequential(
        nn.Flatten(), first, nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)
    )


def images(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 2), nn.GroupNorm(1, channels), nn.ReLU()),
        *(nn.Conv2d(channels, 5, 2), nn.Flatten(), nn.Linear(5, 3)),
    )


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(7, (tasks.EXAMPLES, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _rows(generator: torch.Generator) -> Batch:
    x = torch.randn(tasks.EXAMPLES, 2, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (tasks.EXAMPLES,), generator=generator)


def _pictures(generator: torch.Generator) -> Batch:
    x = torch.randn(tasks.EXAMPLES, 1, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (tasks.EXAMPLES,), generator=generator)


def _numbers(generator: torch.Generator) -> Batch:
    x, y = _rows(generator)
    return x, y.double()


def _positions(generator: torch.Generator) -> Batch:
    x, _ = _rows(generator)
    return x, torch.randint(3, (tasks.EXAMPLES, 2), generator=generator)


def of_squares(z: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(z[:, 0], y, reduction=reduction)


class Problem(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    apart: tuple[str, ...]  # the layers that are gathered one after the other; all others are with the root
    loss: Callable[..., Tensor] = F.cross_entropy


PROBLEMS = {
    "layers": Problem(tasks.network, _rows, ("0", "2", "4", "5")),
    "all at once": Problem(tasks.network, _rows, ()),
    "tied": Problem(Tied, _tokens, ("mix",)),
    "derived": Problem(derived, _numbers, ("1", "5"), of_squares),
    "images": Problem(images, _pictures, ("0", "3", "5")),
    "merging": Problem(Merging, _positions, ("second",)),
    "statistics": Problem(with_statistics, _rows, ("1", "2")),
}


def model_of(problem: str, sharded: bool) -> nn.Module:
    model = _built(PROBLEMS[problem].make)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for name in PROBLEMS[problem].apart:
            fully_shard(model.get_submodule(name), reshard_after_forward=True)
        fully_shard(model)
    return model


def batches(problem: str, steps: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [PROBLEMS[problem].batch(generator) for _ in range(steps)]


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


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


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


# ────────────────────────────────────────
# What is refused, and ranks that die.


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except credo.errors.CredoError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def refusals(rank: int, size: int) -> dict[str, str]:
    import copy

    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def sharded(**options: Any) -> nn.Module:
        return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)

    def partly() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        return model

    def built(method: str = "VOGN", **options: Any) -> Any:
        return getattr(credo, method)(sharded(), data_size=10, **options)

    model = sharded()
    optimizer = credo.VOGN(model, data_size=10)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    actions: dict[str, Callable[[], Any]] = {
        "KFAC": lambda: built("KFAC"),
        "NoisyKFAC": lambda: built("NoisyKFAC"),
        "vectorized": lambda: built(mc_samples=2, vectorized=True),
        "mc_slices": lambda: built(mc_slices=2),
        "mc_groups": lambda: built(mc_groups=1),
        "parameters": lambda: credo.VOGN(model.parameters(), data_size=10),
        "partly": lambda: credo.VOGN(partly(), data_size=10),
        "mixed precision": lambda: credo.VOGN(sharded(mp_policy=half), data_size=10),
        "offload": lambda: credo.VOGN(
            sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), data_size=10
        ),
        "columns": lambda: credo.VOGN(sharded(shard_placement_fn=lambda p: Shard(p.dim() - 1)), data_size=10),
        "copy": lambda: copy.deepcopy(optimizer),
        "supply": lambda: optimizer.supply({}, 3),
        "capture": lambda: credo.capture(model),
        "predict": lambda: credo.predict(model, optimizer.posterior(), torch.ones(2, 4)),
        "penalty": lambda: optimizer.step(lambda: _with_penalty(optimizer, model)),
    }
    return {name: said(action) for name, action in actions.items()}


def _with_penalty(optimizer: Any, model: nn.Module) -> Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    penalty = sum(whole(p.square().sum()) for p in model.parameters())
    (loss + penalty).backward()
    return loss


def without_examples(rank: int, size: int) -> str:
    model = model_of("all at once", True)
    optimizer = tasks.optimizer_of("VOGN", model)
    x, y = batches("all at once")[0]
    own = slice(0, len(x) if rank == 0 else 0)
    return said(lambda: step(optimizer, model, (x[own], y[own]), "all at once", "closure"))


def fault(rank: int, size: int, method: str, when: str) -> dict[str, Any]:
    """A step, then the last rank dies: before its forward pass, or in it."""
    model: Any = model_of("layers", True)
    optimizer = tasks.optimizer_of(method, model)
    (x, y), other = batches("layers")[:2]
    step(optimizer, model, (x, y), "layers", "closure")
    before = [p.to_local().detach().clone() for p in model.parameters()]
    if rank == size - 1:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        model[3].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.perf_counter()
    ended = said(lambda: step(optimizer, model, other, "layers", "closure"))
    seconds = time.perf_counter() - start
    same = [torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)]
    return {"ended": ended, "seconds": seconds, "mean in place": all(same)}


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


def unwrapped(rank: int, size: int) -> list[str]:
    outer = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    return [
        said(lambda: credo.VOGN(outer, data_size=10)),
        said(lambda: credo.VOGN(nn.DataParallel(nn.Linear(2, 2)), data_size=10)),
    ]
