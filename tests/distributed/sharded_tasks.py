"""What the ranks of the sharding tests do. Results are plain numpy arrays and numbers, which any process can read."""

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import credo
from credo.optim import kronecker
from tests.distributed.tasks import STEPS, batches, described, network, one_step, optimizer_of, shares


def grouped(model: nn.Module, method: str, options: Mapping[str, Any]) -> Any:
    """Three groups: one with its own numbers, one deterministic, and one that joins after a step."""
    names = dict(model.named_parameters())
    first = [(n, p) for n, p in names.items() if n.startswith("0.")]
    second = [(n, p) for n, p in names.items() if n.startswith("2.")]
    groups = [
        {"params": first, "lr": 0.02, "prior_precision": 3.0},
        {"params": second, "deterministic": True},
    ]
    return getattr(credo, method)(groups, data_size=100, lr=0.01, **options)


def train_groups(rank: int, size: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    model = network()
    optimizer = grouped(model, method, options)
    own = shares("unequal", size)[rank]
    late = [(n, p) for n, p in model.named_parameters() if n[:2] in ("4.", "5.")]
    for _, p in late:
        p.requires_grad_(False)
    losses = []
    for step, (x, y) in enumerate(batches()):
        if step == 1:
            for _, p in late:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": late, "tempering": 0.5})
        losses.append(one_step(optimizer, model, x[own], y[own]))
    return described(model, optimizer, losses)


def train_at_once(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """VOGN with its own noise on every rank, from closures that return the losses of the examples."""
    model = network()
    optimizer = optimizer_of("VOGN", model, initial_curvature=0.01, **options)
    own, losses = shares("unequal", size)[rank], []
    for x, y in batches():
        closure = partial(_losses, model, x[own], y[own])
        losses.append(float(optimizer.step(closure)))
    return described(model, optimizer, losses)


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def state_bytes(rank: int, size: int, method: str, options: dict[str, Any]) -> int:
    """Bytes in the optimiser's state after a step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 3))
    optimizer = optimizer_of(method, model, **options)
    x, y = batches()[0]
    one_step(optimizer, model, x.float(), y)
    optimizer.posterior()
    tensors = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def with_empty_step(rank: int, size: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The last rank takes part in the second step by `step()` alone; rank 0 has looked at a sample before."""
    model = network()
    optimizer = optimizer_of(method, model, **options)
    losses = []
    for step, (x, y) in enumerate(batches()):
        if step == 1 and rank == size - 1:
            losses.append(float(optimizer.step()))
            continue
        own = slice(None) if step == 1 else shares("equal", size)[rank]
        losses.append(one_step(optimizer, model, x[own], y[own]))
    return described(model, optimizer, losses)


def samples(rank: int, size: int, method: str, options: dict[str, Any]) -> list[list[float]]:
    """The weights this rank sees in two blocks after a step."""
    model, seen = network(), []
    optimizer = optimizer_of(method, model, **options)
    own = shares("equal", size)[rank]
    x, y = batches()[0]
    one_step(optimizer, model, x[own], y[own])
    for _ in range(2):
        with optimizer.sampled():
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return seen


def resume(rank: int, size: int, method: str, options: dict[str, Any], saved: Any) -> dict[str, Any]:
    """The second half of a run whose first half was saved: `saved` holds numpy arrays."""
    model = network(seed=3)
    model.load_state_dict({name: torch.tensor(value) for name, value in saved["model"].items()})
    optimizer = optimizer_of(method, model, **options)
    optimizer.load_state_dict(_from_arrays(saved["optimizer"]))
    own = shares("unequal", size)[rank] if size > 1 else slice(None)
    losses = [one_step(optimizer, model, x[own], y[own]) for x, y in batches()[STEPS // 2 :]]
    return described(model, optimizer, losses)


def first_half(rank: int, size: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    model = network()
    optimizer = optimizer_of(method, model, **options)
    own = shares("equal", size)[rank]
    for x, y in batches()[: STEPS // 2]:
        one_step(optimizer, model, x[own], y[own])
    model_state = {name: value.numpy() for name, value in model.state_dict().items()}
    return {"model": model_state, "optimizer": _to_arrays(optimizer.state_dict())}


def _to_arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().numpy().copy()  # a counter is the optimiser's own, and goes on counting
    if isinstance(value, Mapping):
        return {key: _to_arrays(item) for key, item in value.items()}
    return [_to_arrays(item) for item in value] if isinstance(value, list) else value


def _from_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: _from_arrays(item) for key, item in value.items()}
    return [_from_arrays(item) for item in value] if isinstance(value, list) else value


def nan_on_one(rank: int, size: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The second step has a NaN on the last rank only, in one weight's gradient only; state before and after it."""
    model = network()
    optimizer = optimizer_of(method, model, **options)
    own, before, after = shares("equal", size)[rank], None, None
    for step, (x, y) in enumerate(batches()):
        if step == 1:
            before = _to_arrays(copy.deepcopy(optimizer.state_dict()["state"]))
            with optimizer.sampled():
                nn.functional.cross_entropy(model(x[own]), y[own]).backward()
            if rank == size - 1:
                next(model.parameters()).grad.view(-1)[0] = math.nan
            optimizer.step()
            after = _to_arrays(optimizer.state_dict()["state"])
            continue
        one_step(optimizer, model, x[own], y[own])
    return {**described(model, optimizer, []), "before": before, "after": after}


def channels_last(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Parameters whose elements do not lie in memory in the order of their indices."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    optimizer = optimizer_of("VOGN", model, shared_noise=True, initial_curvature=0.01, **options)
    generator = torch.Generator().manual_seed(5)
    own, losses = shares("unequal", size)[rank] if size > 1 else slice(None), []
    for _, y in batches():
        x = torch.randn(len(y), 3, 3, 3, generator=generator, dtype=torch.float64)
        losses.append(one_step(optimizer, model, x[own].to(memory_format=torch.channels_last), y[own]))
    return described(model, optimizer, losses)


def inverted(rank: int, size: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Which sides of which layers this rank has inverted in one step."""
    done: list[tuple[str, str]] = []
    original = kronecker.KroneckerLayer.invert_side

    def invert_side(layer: Any, side: str, form: str) -> None:
        done.append((layer.names[0], side))
        original(layer, side, form)

    model = network()
    optimizer = optimizer_of("KFAC", model, **options)
    x, y = batches()[0]
    with patch.object(kronecker.KroneckerLayer, "invert_side", invert_side):
        one_step(optimizer, model, x, y)
    return done


def singular(rank: int, size: int) -> str:
    """A factor that one rank cannot invert, because there is neither prior nor damping worth the name."""
    model = network()
    optimizer = optimizer_of("KFAC", model, damping_form="pi")
    x, y = batches()[0]
    original = kronecker.KroneckerLayer.invert_side

    def invert_side(layer: Any, side: str, form: str) -> None:
        if rank == 1:
            raise credo.errors.InvalidValue("a Kronecker factor is singular")
        original(layer, side, form)

    try:
        with patch.object(kronecker.KroneckerLayer, "invert_side", invert_side):
            one_step(optimizer, model, x, y)
    except credo.errors.InvalidValue as error:
        return str(error)
    return "stepped"


def build(rank: int, size: int, what: str) -> str:
    """What an optimiser says that cannot be sharded."""
    model = nn.Linear(3, 2)
    if what == "gaps":
        model.weight = nn.Parameter(torch.randn(2, 6)[:, ::2])
    if what == "order" and rank:
        model.weight = nn.Parameter(torch.randn(3, 2).mT)
    try:
        if what == "inner":
            optimizer: Any = credo.BayesByBackprop(
                model, data_size=10, inner=torch.optim.Adafactor, sharded=True
            )
        else:
            optimizer = credo.VOGN(model, data_size=10, sharded=True)
        one_step(optimizer, model, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    except credo.errors.InvalidValue as error:
        return str(error)
    return "built"


def copied(rank: int, size: int, method: str) -> bool:
    """A deep copy goes on as the original does."""
    model = network()
    optimizer = optimizer_of(method, model, sharded=True)
    own, data = shares("equal", size)[rank], batches()
    one_step(optimizer, model, data[0][0][own], data[0][1][own])
    twin, twin_model = copy.deepcopy((optimizer, model))
    for other, network_ in ((optimizer, model), (twin, twin_model)):
        one_step(other, network_, data[1][0][own], data[1][1][own])
    pairs = zip(model.parameters(), twin_model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def kept_by_layer(rank: int, size: int, options: dict[str, Any]) -> dict[str, list[str]]:
    """What this rank has after two steps, by the names of parameters."""
    model, done = network(), set()
    optimizer = optimizer_of("NoisyKFAC", model, inverse_interval=1, **options)
    original = kronecker.KroneckerLayer.invert_side

    def invert_side(layer: Any, side: str, form: str) -> None:
        done.add(layer.names[0])
        original(layer, side, form)

    with patch.object(kronecker.KroneckerLayer, "invert_side", invert_side):
        for x, y in batches()[:2]:
            one_step(optimizer, model, x, y)
    optimizer.posterior()  # has everything for a moment
    names = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return {
        "layers": [name for name, kept in names.items() if "input_factor" in kept or "input_root" in kept],
        "momenta": sorted((n for n, kept in names.items() if "momentum" in kept), key=lambda n: n[0] == "4"),
        "parameters": [name for name in names if name[0] != "4"],
        "inverted": sorted(done),
    }


def freezing(rank: int, size: int, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Before the second step a bias freezes, before the third the weight of another layer; then both thaw."""
    model = network()
    named, optimizer = dict(model.named_parameters()), optimizer_of(method, model, **options)
    own, losses = shares("empty" if size > 1 else "equal", size)[rank], []
    for step, (x, y) in enumerate([*batches(), *batches()]):
        named["2.bias"].requires_grad_(step not in (1, 2, 3))
        named["5.weight"].requires_grad_(step not in (2, 3, 4))
        losses.append(one_step(optimizer, model, x[own], y[own]))
    return described(model, optimizer, losses)


def looking(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two samples a step after a look; the last rank has no examples, and steps alone."""
    model = network()
    optimizer = optimizer_of("NoisyKFAC", model, mc_samples=2, **options)
    losses = []
    for x, y in batches():
        with optimizer.sampled():
            pass
        if size > 1 and rank == size - 1:
            losses.append(float(optimizer.step()))
        else:
            losses.append(one_step(optimizer, model, x, y))
    return described(model, optimizer, losses)
