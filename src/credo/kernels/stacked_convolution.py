"""Convolutions with weights of their own for each slice of the examples, all in one call, and their input's gradient.

torch's convolution takes some 50 µs to begin, for every slice. It is as fast as the kernel where a slice has much to
do, and faster where rows are so short that the kernel's lanes, which are neighbours in a row, have nothing to do.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels import native
from credo.kernels.prepared import Prepared
from credo.kernels.scratch import LIMIT, workspace

WORK = 64 << 20  # products of numbers for one slice,
IDLE = 8 << 20  # and lanes without one: beyond either, torch's convolution pays for its calls
LANES = 64  # bytes

Pair = tuple[int, int]


class Flat(NamedTuple):
    """A geometry in two dimensions; a convolution in one has images of one row."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class PlannedStack:
    """The kernel for one kind of inputs and weights: what calls of it have in common."""

    def __init__(self, kernel: native.Kernel, x: Tensor, weights: Tensor, at: Flat):
        self._kernel, self._threads = kernel, torch.get_num_threads()
        kernel_size, size = _pair(weights.shape[3:]), _pair(x.shape[2:])
        self._places = _places(size, kernel_size, at)
        self._slices = min(len(weights), len(x))
        outputs, own = weights.shape[1], weights[0, 0].numel()
        taps = math.prod(kernel_size)
        whole = (len(x), self._slices)
        self._forward = native.integers(
            *(*whole, x.shape[1], outputs, at.groups, *size, *self._places, *kernel_size),
            *(*at.stride, *at.padding, *at.dilation, 1, 1),
            *(outputs * own, own, taps, 0, 1),
        )
        around = [d * (k - 1) - p for d, k, p in zip(at.dilation, kernel_size, at.padding, strict=True)]
        self._backward = native.integers(
            *(*whole, outputs, x.shape[1], at.groups, *self._places, *size, *kernel_size),
            *(1, 1, *around, *at.dilation, *at.stride),
            *(outputs * own, taps, own, taps - 1, -1),  # weights turned round
        )
        nothing = native.pointer(None)
        # Without memory the kernel only says how much of it a thread needs.
        needed = max(kernel(numbers, *[nothing] * 5, 1) for numbers in (self._forward, self._backward))
        self.scratch_bytes = needed * self._threads
        self._out = (len(x), outputs, *self._places[4 - x.dim() :])

    def __call__(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """The convolution of x (M, C, …) by weights (S, O, C / groups, …) and biases (S, O)."""
        return self._run(self._forward, x, weights, biases, x.new_empty(self._out))

    def input_gradient(self, g: Tensor, weights: Tensor, like: Tensor) -> Tensor:
        """What the output's gradient g sends back to an input like `like`."""
        return self._run(self._backward, g.contiguous(), weights, None, torch.empty_like(like))

    def _run(self, numbers: object, x: Tensor, weights: Tensor, biases: Tensor | None, out: Tensor) -> Tensor:
        memory = native.address(workspace("stacked convolution", self.scratch_bytes // x.element_size(), x))
        self._kernel(numbers, *map(native.pointer, (x, weights, biases, out)), memory, self._threads)
        return out


def stacked(x: Tensor, weights: Tensor, biases: Tensor | None, at: Flat) -> PlannedStack | None:
    """How to do it for tensors like these; None where the kernel does not suit them."""
    alike = x.is_contiguous() and weights.is_contiguous() and x.dtype is weights.dtype
    if not alike or not x.is_cpu or not (biases is None or _suits(biases, weights)):
        return None
    return _prepared.get((x.shape, weights.shape, x.dtype, at), x, weights, at)


def _make(x: Tensor, weights: Tensor, at: Flat) -> PlannedStack | None:
    dims, wide = x.dim() - 2, x.dtype in (torch.float32, torch.float64)
    if dims not in (1, 2) or not wide or x.numel() == 0 or weights.numel() == 0:
        return None
    impossible = min(at.padding) < 0 or min(*at.stride, *at.dilation) < 1
    if impossible or x.shape[1] != weights.shape[2] * at.groups or weights.shape[1] % at.groups:
        return None  # torch says what is wrong; the kernel would read beyond the weights
    rows, columns = _places(_pair(x.shape[2:]), _pair(weights.shape[3:]), at)
    if rows < 1 or columns < 1:
        return None
    of_a_column = weights[0].numel() * rows * -(-len(x) // len(weights))
    idle = -columns % (LANES // x.element_size())
    if columns * of_a_column > WORK or idle * of_a_column > IDLE:
        return None
    kernel = native.kernel(f"stacked_convolution_{native.suffix(x.dtype)}")
    plan = None if kernel is None else PlannedStack(kernel, x, weights, at)
    return plan if plan is not None and plan.scratch_bytes <= LIMIT else None


_prepared = Prepared(_make)


def _suits(biases: Tensor, weights: Tensor) -> bool:
    alike = biases.dtype is weights.dtype and biases.shape == weights.shape[:2]
    return alike and biases.is_contiguous()


def _pair(sizes: torch.Size) -> Pair:
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _places(size: Pair, kernel_size: Pair, at: Flat) -> Pair:
    rows, columns = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel_size, at.stride, at.padding, at.dilation, strict=True)
    )
    return rows, columns
