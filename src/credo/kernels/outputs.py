"""Noise on the outputs of a layer, for local reparameterisation: z = mean + √variance·ε, and its slope."""

from ctypes import c_double, c_int64

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import accelerator, noise, tensors
from credo.kernels.native import integers

TINY = 1e-30  # an output whose inputs are all zero has no variance, and √ no slope there


@torch.no_grad()
def perturb_(mean: Tensor, variance: Tensor, seed: int, stream: int, index: int) -> None:
    """mean ← mean + √(variance + tiny)·ε and variance ← ε / 2√(variance + tiny), which is ∂z/∂variance."""
    if call := tensors.call("noisy", [mean], [variance]):
        key, threads = integers(seed, stream, index), c_int64(torch.get_num_threads())
        call.kernel(call.addresses, c_int64(mean.numel()), key, c_double(TINY), threads)
        increment_version([mean, variance])
        return
    if not mean.is_cpu:
        accelerator.run("perturb", mean, variance, seed, stream, index, TINY)
        return
    epsilon = torch.empty_like(variance)
    noise.normal_(epsilon, seed, stream, index)
    sd = variance.add_(TINY).sqrt_()
    mean.add_(sd * epsilon)
    torch.div(epsilon, sd.mul_(2), out=variance)
