"""Whether the Triton programs can run for a device, and the one line that says why not.

Nothing is tried until a tensor lies on a CUDA device. With TRITON_INTERPRET=1 the programs take tensors on the CPU,
which only the tests give them.
"""

import ctypes
import os
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from credo.kernels import native

OLDEST = (8, 0)  # compute capability: tensor cores of older devices know neither bfloat16 nor TF32
_given_up: list[str] = []  # why, where a program could not be compiled or started: none is tried again


def runs_for(tensor: Tensor) -> bool:
    """Whether the programs run for tensors like this one. Where they could be expected to, it warns once."""
    if native.choice()[0] == "off":
        return False
    if tensor.is_cpu:
        return interpreted() and not _given_up
    if tensor.device.type != "cuda":
        return False
    failure = failure_on(tensor.device.index or 0)
    if failure:
        warn_once(failure)
    return not failure


def accelerator() -> tuple[str, str]:
    """What runs on the current GPU ("Triton", "plain torch", or "none" where there is none), and why."""
    if failure := driver_failure():
        return "none", failure
    index = torch.cuda.current_device()
    chosen, asked_by = native.choice()
    failure = f"Triton is switched off by {asked_by}" if chosen == "off" else failure_on(index)
    if failure:
        return "plain torch", failure
    return "Triton", f"version {triton_version()}, {torch.cuda.get_device_name(index)}"


def failure_on(index: int) -> str:
    """Why the programs cannot run on CUDA device `index`; empty where they can."""
    return _given_up[0] if _given_up else device_failure(index) or import_failure()


def driver_failure() -> str:
    """Why torch finds no CUDA device; empty where it does."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA: install another one, see pytorch.org"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if told:  # torch says it when the driver is too old
        return " ".join(str(told[0].message).split()).partition(" (Triggered")[0]
    if not has_driver():
        return "the NVIDIA driver is missing (libcuda.so.1 was not found)"
    return "the NVIDIA driver is there, but torch finds no GPU (look at nvidia-smi and CUDA_VISIBLE_DEVICES)"


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def device_failure(index: int) -> str:
    """Why the device is none for the programs."""
    if torch.version.hip is not None:
        return "the programs were never compiled for AMD GPUs"
    own = torch.cuda.get_device_capability(index)
    if own >= OLDEST:
        return ""
    shown, oldest = (".".join(map(str, capability)) for capability in (own, OLDEST))
    name = torch.cuda.get_device_name(index)
    return f"{name} has compute capability {shown}, and Triton programs are for {oldest} and above"


@cache
def import_failure() -> str:
    """Why Triton cannot be imported."""
    if find_spec("triton") is None:
        return "Triton is not installed; install with: pip install 'credo[triton]'"
    try:
        import_module("credo.kernels.triton.programs.lists")
    except Exception as error:  # whatever a broken installation raises
        return f"Triton {triton_version()} cannot be imported: {one_line(error)}"
    return ""


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "of unknown version"


@cache
def interpreted() -> bool:
    """Whether Triton interprets its programs instead of compiling them."""
    return (
        os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes") and not import_failure()
    )


def give_up(program: str, error: Exception) -> None:
    """After a program that could not be compiled or started; all that follows is plain torch."""
    _given_up.append(f"the program {program} could not run: {one_line(error)}")
    warn_once(_given_up[0])


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@cache
def warn_once(failure: str) -> None:
    """Say once per process that plain torch runs: right results, more launches."""
    warnings.warn(
        f"credo runs in plain torch on the GPU, which is slower than its Triton kernels: {failure}.",
        RuntimeWarning,
        stacklevel=4,
    )
