"""State dicts that resume exactly: settings and counters beside torch's own, and state in its own dtype.

`Optimizer.load_state_dict` casts floating state to the parameter's dtype, which would round the
float32 curvature of a bfloat16 parameter.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from credo.errors import InvalidValue, VersionError

VERSION = 1
SCALE = (
    "scale"  # a few numbers of a tensor, read at every step: in main memory, whatever the parameter's device
)
# What is kept beside a parameter and has a shape of its own.
FACTORS = (
    SCALE,
    "input_factor",
    "output_factor",
    "input_root",
    "output_root",
    "input_eigenvalues",
    "output_eigenvalues",
)
OF_THIS_WORLD = ("sharded", "owners", "mc_groups")  # settings that are not saved: the state is, as a whole
_DRIFT = ("data_size", "augmentation", "mc_samples", "reduction", "seed")


def own_state(method: str, settings: Mapping[str, Any], counters: Mapping[str, int]) -> dict[str, Any]:
    """What stands in a state dict beside torch's own."""
    kept = {k: v for k, v in settings.items() if k not in OF_THIS_WORLD}
    return {"version": VERSION, "method": method, "settings": kept, "counters": dict(counters)}


def check_state(
    optimizer: Optimizer,
    method: str,
    settings: Mapping[str, Any],
    saved: Mapping[str, Any],
    shape_of: Callable[[Tensor], torch.Size],
) -> None:
    """Refuses a state dict of another version, method or model before anything is loaded."""
    own = saved.get("credo")
    if not isinstance(own, Mapping):
        raise InvalidValue(
            f"this state dict was not saved by a credo optimiser; its keys are {sorted(saved)}."
        )
    if own["version"] > VERSION:
        raise VersionError(
            f"the state dict has version {own['version']}, newer than {VERSION}. Upgrade credo."
        )
    if own["method"] != method:
        raise InvalidValue(f"the state dict was saved by {own['method']}, this optimiser is {method}.")
    inner = own["settings"].get("inner"), settings.get("inner")
    if inner[0] != inner[1]:
        raise InvalidValue(f"the state dict is of the inner optimiser {inner[0]}, here it is {inner[1]}.")
    _check_shapes(optimizer, saved, shape_of)
    drift = [
        f"{k}: saved {own['settings'][k]!r}, here {settings[k]!r}"
        for k in _DRIFT
        if own["settings"].get(k) != settings[k]
    ]
    if drift:
        warnings.warn(
            f"settings differ from the saved ones, which are taken: {'; '.join(drift)}", stacklevel=3
        )


def _check_shapes(
    optimizer: Optimizer, saved: Mapping[str, Any], shape_of: Callable[[Tensor], torch.Size]
) -> None:
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=False)
    for group, other in groups:
        names = group.get("param_names", other["params"])
        for name, p, key in zip(names, group["params"], other["params"], strict=False):
            for kind, value in saved["state"].get(key, {}).items():
                if (
                    isinstance(value, Tensor)
                    and value.dim()
                    and kind not in FACTORS
                    and value.shape != shape_of(p)
                ):
                    raise InvalidValue(
                        f"{kind} of parameter {name!r} was saved with shape {tuple(value.shape)}; here the parameter "
                        f"has shape {tuple(shape_of(p))}. The state dict belongs to another model."
                    )


def restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Puts the saved tensors back as they were saved, on the parameter's device."""
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, key in zip(group["params"], other["params"], strict=True):
            for kind, value in saved["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[p][kind] = value.detach().clone().to("cpu" if kind == SCALE else p.device)
