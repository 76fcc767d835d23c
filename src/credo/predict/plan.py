"""Whether to run samples one by one or many at a time: decided from shapes, never from a clock.

One function is run first, watched: its largest intermediate tensor (a bytes), the size of its weights
(w bytes), its convolutions. Measured on two AVX2 cores with networks from 2-32-32-2 to ResNet-18:

* Many at a time saves Python and makes matrix products larger, but its intermediates are c·a bytes. Beyond a
  cache of about 10 MB the gain is lost, so c = 10 MB / a; below four samples vmap costs more than it saves.
  From a of 128 kB on the loop's own products are large enough (an MLP of width 100 at batch 512: a tie).
* Convolutions with different weights become grouped ones. These lose to the loop, except when a is so small
  that overhead decides, or when the network is narrow: with few channels the vector units idle in the loop,
  and in channels_last all samples lie side by side as channels (LeNet-5 at batch 32: 0.4 of the loop).
* An operation that vmap has no rule for would run as a hidden loop, random ones would draw other numbers, and
  hooks would see batched tensors: these stay a loop.

The same model and shapes thus always take the same path, and the same seed the same bits. The constants are
those of CPUs; on accelerators the rule is right and its speed unmeasured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CACHE = 10 * 10**6  # bytes that intermediates of one chunk may take
SMALL = 128 * 2**10  # bytes of the largest intermediate, below which overhead decides
HEAVY = 4 * 2**20  # bytes of weights above which convolutions gain nothing
NARROW = 16  # output channels of two AVX2 vectors
WORTH = 4  # samples at a time


@dataclass(frozen=True)
class Plan:
    chunk: int  # samples at a time; 1 is the plain loop
    channels_last: bool = False


LOOP = Plan(1)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one forward does, seen below autograd, where every operation is a real one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0  # bytes of the largest result
        self.batchable = True
        self.largest_convolution, self.channels, self.planar = 0, 0, True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = () if func.is_view else _tensors(result)
        size = max((tensor.numel() * tensor.element_size() for tensor in made), default=0)
        self.largest = max(self.largest, size)
        self.batchable &= _has_rule(func) or next(_tensors(args), None) is None
        self.batchable &= torch.Tag.nondeterministic_seeded not in func.tags
        if func is torch.ops.aten.convolution.default and size > self.largest_convolution:
            self.largest_convolution, self.channels = size, args[1].shape[0]
            self.planar = args[0].dim() == 4 and not args[6]  # 2-d, not transposed
        return result


def choose(meter: Meter, module: nn.Module, samples: int, weight_bytes: int, force: bool = False) -> Plan:
    """The rule above. `force` asks for many at a time wherever it is possible at all."""
    room = max(1, CACHE // max(1, meter.largest))
    chunk = _even(samples, max(room, WORTH) if force else room)
    if not meter.batchable or has_hooks(module) or samples == 1:
        return LOOP
    narrow = meter.largest_convolution > 0 and meter.planar and meter.channels < NARROW
    if force:
        return Plan(chunk, channels_last=narrow)
    light = not meter.largest_convolution or weight_bytes <= HEAVY
    pays = light and (narrow or meter.largest <= SMALL) and chunk >= WORTH
    return Plan(chunk, channels_last=narrow) if pays else LOOP


def has_hooks(module: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def _even(samples: int, most: int) -> int:
    """The size of equal chunks, none above `most`: 32 samples with room for 20 are two of 16."""
    return -(-samples // -(-samples // most))


def _has_rule(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "FuncTorchBatched")


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
