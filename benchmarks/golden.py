"""Whether two commits compute the same bits: digests of state and posterior after some steps of every method.

    python -m benchmarks.golden --write FILE        # at the commit before
    python -m benchmarks.golden --check FILE        # at the commit after, on the same machine

Processors round differently, so a file is true on the machine that has written it and is not kept in the repository.
`--check` names the cases that differ, and how far their numbers are apart.
"""

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo

STEPS, BATCH, DATA = 6, 12, 60
METHODS = ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop")
SAMPLING = ("VOGN", "IVON", "NoisyKFAC", "BayesByBackprop")


class Form(NamedTuple):
    """One way to train."""

    options: Mapping[str, Any] = {}
    methods: tuple[str, ...] = METHODS
    block: bool = False  # sampled() and step() by hand
    losses: bool = False  # the closure returns losses and leaves backward to the optimiser
    prior: bool = False
    groups: bool = False  # two, of which one is deterministic
    accumulate: int = 1


GAUSS_NEWTON = ("VOGN", "OGN")
FORMS = {
    "closure": Form(),
    "block": Form(block=True),
    "losses": Form(losses=True),
    "K=3": Form({"mc_samples": 3}, SAMPLING),
    "K=3 block": Form({"mc_samples": 3}, SAMPLING, block=True),
    "slices": Form({"mc_slices": 3}, ("VOGN",)),
    "vectorized": Form({"mc_samples": 3, "vectorized": True}, ("VOGN", "BayesByBackprop"), losses=True),
    "prior": Form(prior=True),
    "groups": Form(groups=True),
    "accumulate": Form(accumulate=2),
    "accumulate K=3": Form({"mc_samples": 3}, SAMPLING, accumulate=2),
    "sum": Form({"reduction": "sum", "lr": 1e-3}),
    "lr": Form({"lr": 0.01}),
    "absolute": Form({"lr": 1e-3, "damping": 0.01, "tempering": 0.5}, ("VOGN", "OGN", "KFAC", "NoisyKFAC")),
    "initial precision": Form({"initial_precision": 100.0}, GAUSS_NEWTON),
    "initial curvature": Form({"initial_curvature": 0.5}, ("VOGN", "OGN", "IVON")),
    "clipped": Form({"clip_radius": 0.5}, ("IVON",)),
    "pi": Form({"damping_form": "pi", "lr": 0.01, "damping": 0.01}, ("KFAC", "NoisyKFAC")),
    "relative": Form({"initial_log_variance": "relative"}, ("BayesByBackprop",)),
    "not local": Form({"local": False}, ("BayesByBackprop",)),
}


def mlp(dtype: torch.dtype) -> nn.Module:
    layers = nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 3)
    return nn.Sequential(nn.Flatten(), *layers).to(dtype)


def convolutional(dtype: torch.dtype) -> nn.Module:
    convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2)
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).to(dtype)


MODELS: dict[str, tuple[Callable[[torch.dtype], nn.Module], tuple[int, ...], torch.dtype]] = {
    "mlp": (mlp, (7,), torch.float32),
    "mlp double": (mlp, (7,), torch.float64),
    "mlp bfloat16": (mlp, (7,), torch.bfloat16),
    "conv": (convolutional, (2, 4, 4), torch.float32),
}


def cases() -> Iterator[tuple[str, str, str]]:
    """Method, form, model."""
    for model in MODELS:
        for form, how in FORMS.items():
            if model == "mlp" or form in ("closure", "K=3", "accumulate", "prior", "lr"):
                yield from ((method, form, model) for method in how.methods)


def train(method: str, form: Form, name: str) -> tuple[Any, Any]:
    """The optimiser and its posterior."""
    build, shape, dtype = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    model = _filled(build(dtype), generator)
    inputs = torch.randn(STEPS, BATCH, *shape, generator=generator).to(dtype)
    targets = torch.randint(0, 3, (STEPS, BATCH), generator=generator)
    optimizer = _optimizer(method, form, model)
    reduction = "none" if form.losses else form.options.get("reduction", "mean")
    for x, y in zip(inputs, targets, strict=True):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction=reduction)
            if reduction != "none":
                loss.backward()
            return loss

        if not form.block:
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        for _ in range(form.options.get("mc_samples", 1)):
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer, optimizer.posterior()


def _filled(model: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model


def _optimizer(method: str, form: Form, model: nn.Module) -> Any:
    make, options = getattr(credo, method), dict(form.options)
    if form.prior:
        named = dict(model.named_parameters())
        mean = {name: p.detach() / 2 for name, p in named.items()}
        variance = {name: 0.1 + p.detach().float().square() for name, p in named.items()}
        options["prior"] = credo.DiagonalPosterior(mean, variance, {})
    params: Any = model
    if form.groups:
        named_rows = list(model.named_parameters())
        params = [{"params": named_rows[:2], "lr": 0.02}, {"params": named_rows[2:4]}]
        params += [{"params": named_rows[4:], "deterministic": True}]
    optimizer = make(params, data_size=DATA, seed=3, **options)
    if form.accumulate > 1:
        optimizer.accumulate(form.accumulate)
    return optimizer


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested dicts and lists, with its place."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for k, own in enumerate(value):
            yield from leaves(own, f"{path}/{k}")
    else:
        yield path, value


def digest(optimizer: Any, posterior: Any) -> tuple[str, float]:
    """SHA-256 of all that an optimiser and its posterior hold, and the sum of the sizes of its numbers."""
    found, total = hashlib.sha256(), 0.0
    own = {"state": optimizer.state_dict(), "mean": posterior.mean, "variance": posterior.variance}
    sample = posterior.sample(torch.Generator().manual_seed(5))
    for path, value in leaves({**own, "metadata": posterior.metadata, "sample": sample}):
        found.update(path.encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            total += float(value.double().abs().sum())
        else:
            found.update(repr(value).encode())
    return found.hexdigest(), total


def digests(only: str = "") -> dict[str, tuple[str, float]]:
    """Case → digest and size, with kernels and without."""
    found = {}
    for kernels in ("on", "off"):
        for method, form, model in cases():
            name = f"{method}, {form}, {model}, kernels {kernels}"
            if only not in name:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = _digest_of(method, FORMS[form], model, kernels == "on")
    return found


def _digest_of(method: str, form: Form, model: str, kernels: bool) -> tuple[str, float]:
    if kernels:
        return digest(*train(method, form, model))
    with credo.kernels.forced("off"):
        return digest(*train(method, form, model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = digests(chosen.only)
    if chosen.write:
        chosen.write.write_text(json.dumps(found, indent=1))
    if not chosen.check:
        print(f"{len(found)} cases")
        return
    known = json.loads(chosen.check.read_text())
    wrong = [name for name in found if name not in known or known[name][0] != found[name][0]]
    for name in wrong:
        before, now = known.get(name, ["", float("nan")])[1], found[name][1]
        print(f"differs: {name} (relative difference of sizes {abs(now - before) / max(before, 1e-30):.1e})")
    print(f"{len(found) - len(wrong)} of {len(found)} cases have the same bits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
