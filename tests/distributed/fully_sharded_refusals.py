"""What is refused to models under `fully_shard`, with which message, and what ranks do when one of them dies."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import credo
from tests.distributed import tasks
from tests.distributed.fully_sharded_models import batches, model_of, whole
from tests.distributed.fully_sharded_tasks import step


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
        "waiting": lambda: _waiting(optimizer, model).state_dict(),
        "loaded": lambda: optimizer.load_state_dict(_saved_while_waiting()),
        "penalty": lambda: optimizer.step(lambda: _with_penalty(optimizer, model)),
    }
    return {name: said(action) for name, action in actions.items()}


def _waiting(optimizer: Any, model: nn.Module) -> Any:
    """One of two micro-batches has been seen."""
    optimizer.accumulate(2)
    _one_step(optimizer, model)
    return optimizer


def _one_step(optimizer: Any, model: nn.Module) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean(1).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def _saved_while_waiting() -> dict[str, Any]:
    """By a plain model, whose sums are of all that its process has seen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = credo.VOGN(model, data_size=10)
    found: dict[str, Any] = _waiting(optimizer, model).state_dict()
    return found


def saving_while_waiting(rank: int, size: int, method: str) -> dict[str, Any]:
    """A refused state dict has changed nothing: the update goes on as in a run that did not ask."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {"messages": [], "means": []}
    for asks in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
        fully_shard(model)
        optimizer = getattr(credo, method)(model, data_size=10)
        optimizer.accumulate(3)
        x = torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()[rank * 3 : rank * 3 + 3]
        for k in range(3):
            optimizer.step(lambda k=k, x=x, model=model: (model(x + k) ** 2).mean(1))
            if asks:
                found["messages"].append(said(optimizer.state_dict))
        found["means"].append({name: value.numpy() for name, value in optimizer.posterior().mean.items()})
    return found


def sharded_later(rank: int, size: int, method: str, form: str, trained: bool) -> list[str]:
    """`fully_shard` after the optimiser was built, before and after its first step; then with a new optimiser."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = getattr(credo, method)(model, data_size=10)

    def act(own: Any) -> None:
        if form == "closure":
            return _one_step(own, model)
        if form == "losses":
            return own.step(lambda: model(torch.ones(3, 4)).square().mean(1))
        with own.sampled():
            model(torch.ones(3, 4)).square().mean(1).mean().backward()
        return own.step()

    if trained:
        act(optimizer)
    fully_shard(model[0])
    fully_shard(model)
    first = said(lambda: act(optimizer))
    model.zero_grad()
    return [first, said(lambda: act(getattr(credo, method)(model, data_size=10)))]


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


def unwrapped(rank: int, size: int) -> list[str]:
    outer = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    return [
        said(lambda: credo.VOGN(outer, data_size=10)),
        said(lambda: credo.VOGN(nn.DataParallel(nn.Linear(2, 2)), data_size=10)),
    ]
