"""Calling somebody's model without leaving a trace: no graph, and the global random streams put back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(seed: int, device: torch.device | None) -> Iterator[None]:
    """No gradients inside, and what draws from the global generators gets numbers that depend on `seed` only.

    Loaders shuffle and some models draw even in eval mode; afterwards the global state is bitwise as before.
    Inference mode is lifted: its tensors keep no version, which would tell that a model wrote to its input.
    """
    accelerated = device is not None and device.type not in ("cpu", "meta")
    kind = device.type if device is not None and accelerated else "cuda"
    devices = [device.index or 0] if device is not None and accelerated else []
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            torch.get_device_module(device).manual_seed(seed)
        with torch.inference_mode(False), torch.no_grad():
            yield
