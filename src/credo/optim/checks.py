"""Checks around a step: gradients from elsewhere, replaced layers, a wrong data size, hidden loss scales."""

import sys
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.curvature.loss_factor import Irregular, Unscaled, has_product
from credo.curvature.torch_private import DisableTorchFunction
from credo.errors import CallOrderError, NonFiniteError, UnsupportedOperation
from credo.optim.statistics import StepStatistics

MAX_REFUSED = 10  # non-finite steps in a row before it is an error


_REMEDY = (
    "Micro-batches add up inside credo: call optimizer.accumulate(n) once, step(closure) for every micro-batch "
    "with its own "
    "mean loss, and leave the framework's accumulation off (accumulate_grad_batches=1, "
    "gradient_accumulation_steps=1); or "
    "run them as several backward passes of one `with optimizer.sampled():` block, each loss divided by their number. "
    "Gradients that are not wanted: zero_grad() first."
)


def refuse_foreign_gradients() -> None:
    """A gradient that no block took belongs to no sample."""
    raise CallOrderError(
        "a parameter holds a gradient that was taken outside a sampled() block, where the weights were not a sample "
        f"and no squares were taken. {_REMEDY}"
    )


def refuse_blocks_and_closure(gathered: StepStatistics) -> None:
    raise CallOrderError(
        f"{gathered.samples} sample(s) were taken in sampled() blocks, and step was given a closure, which takes its "
        "own. Call step() without a closure, or leave the blocks out."
    )


def refuse_skipped_closures() -> None:
    """accelerate's optimisers leave `step(closure)` out between updates, so that its micro-batches would be lost."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    options = getattr(state, "_shared_state", {}).get("plugin_kwargs") or {}
    if (steps := options.get("num_steps", 1)) != 1:
        raise CallOrderError(
            f"accelerate's gradient_accumulation_steps={steps} calls step(closure) only for the last micro-batch of an "
            "update and divides its loss: the others would be lost. Build the Accelerator with "
            f"gradient_accumulation_steps=1, and call optimizer.accumulate({steps}) once."
        )


def clearing(
    closure: Callable[[], Tensor], foreign: Sequence[tuple[Tensor, Tensor | None]]
) -> Callable[[], Tensor]:
    """A closure that must clear gradients from elsewhere, which these parameters have.

    In their place stands a number so large that gradients do not change it; where it still is when the closure returns
    for the first time, the closure has meant to add to what was there.
    """
    waiting = [p for p, _ in foreign]

    def checked() -> Tensor:
        marks = [(p, _large(p)) for p in waiting]
        waiting.clear()
        with DisableTorchFunction():  # a block need not see this
            for p, large in marks:
                p.grad = torch.full_like(p, large)
        loss = closure()
        with DisableTorchFunction():
            kept = [
                p.grad is not None and p.numel() > 0 and bool((p.grad > large / 2).all())
                for p, large in marks
            ]
        if any(kept):
            raise CallOrderError(
                "parameters hold gradients that were taken outside a block, and the closure adds to them: they are not "
                f"at its sample, and their squares are not known. {_REMEDY}"
            )
        return loss

    return checked


def _large(parameter: Tensor) -> float:
    return min(1e30, torch.finfo(parameter.dtype).max / 4)


def refuse_replaced(
    module: nn.Module | None, parameters: list[Tensor], names: Callable[[], dict[int, str]]
) -> None:
    """Some parameter has no gradient: one may have been replaced in its module; an unused one is just skipped."""
    if module is None:
        return
    present = {id(p) for p in module.parameters()}
    gone = [names()[id(p)] for p in parameters if id(p) not in present]
    if gone:
        raise CallOrderError(
            f"parameter {gone[0]!r} no longer belongs to the model: a layer was replaced. Construct the optimiser "
            "after changing the model."
        )


def refuse_sharded_since(
    module: nn.Module | None, names: Callable[[], dict[int, str]], error: BaseException | None
) -> None:
    """After a block that saw no example: whether `fully_shard` has put others in the place of these parameters."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or module is None or not (error is None or isinstance(error, Exception)):
        return
    if not any(isinstance(part, kind) for part in module.modules()):
        return
    known = names()
    own = set(known.values())
    gone = [name for name, p in module.named_parameters() if name in own and id(p) not in known]
    if gone:
        raise CallOrderError(
            f"parameter {gone[0]!r} is no longer the one that the optimiser has: fully_shard (FSDP2) was called after "
            "the optimiser was built, and has replaced the parameters. Build the optimiser after fully_shard(model), "
            "from the model."
        ) from error


def refuse_thawed(frozen: Sequence[Tensor], members: Sequence[Tensor], module: nn.Module | None) -> None:
    """Parameters that were frozen when the module was given, and would stay as they are without a word."""
    thawed = {id(p) for p in frozen if p.requires_grad}.difference(map(id, members)) if frozen else ()
    names = (
        [name for name, p in module.named_parameters() if id(p) in thawed]
        if module is not None and thawed
        else ()
    )
    if names:
        raise CallOrderError(
            f"parameter {names[0]!r}{f' and {len(names) - 1} more' if len(names) > 1 else ''} did not require a "
            "gradient when the optimiser was built, and does now: it is in no group and would not be trained. Add it, "
            "optimizer.add_param_group({'params': [...]}), or build the optimiser after requires_grad_. If another "
            "optimiser trains it, build this one from the named parameters that are its own."
        )


def warn_of_small_data(examples: int, data_size: int) -> None:
    warnings.warn(
        f"a batch has {examples} examples, more than data_size={data_size}. data_size is the number of training "
        "examples, not of batches.",
        stacklevel=5,
    )


def loss_scales(optimizer: Optimizer, declared: float | None) -> tuple[float, float]:
    """What the loss was multiplied by, as it still is in `.grad`, and as it is in the squares.

    A GradScaler sets `found_inf` and `grad_scale` on the optimiser around a step; the latter is None if it
    has unscaled the gradients before.
    """
    if not hasattr(optimizer, "found_inf"):
        return declared or 1.0, declared or 1.0
    if hasattr(optimizer, "found_inf") and getattr(optimizer, "_shards", None) is not None:
        raise UnsupportedOperation(
            "a GradScaler on the parameters of fully_shard (FSDP2): ranks would find different scales, each in its own "
            "rows. Use bfloat16, which needs none: torch.autocast(device, torch.bfloat16) in the closure."
        )
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return float(scale), float(scale)
    if declared is None:
        raise CallOrderError(
            "a GradScaler has unscaled the gradients before the step, but not their squares. Declare the scale "
            "where the gradients are taken: with optimizer.sampled(scale=scaler.get_scale())."
        )
    return 1.0, declared


def refuse_changed_gradients(seen: Irregular, gathered: StepStatistics, scale: float | None) -> None:
    """At the end of a block: what is not read from `.grad` knows nothing of what has become of that."""
    # What is read from it may be meant to be that of the last pass alone, as with adversarial examples.
    if seen.cleared and (not gathered.reads_gradients or has_product(seen.factors, 1 / seen.passes)):
        raise CallOrderError(
            "gradients were cleared between two backward passes of one block, and what was gathered in the passes "
            "before is still there. Call zero_grad before the first of them only, or take what is not meant for the "
            "step outside the block (torch.autograd.grad by inputs)."
        )
    if seen.unscaled is not None and scale is None and not gathered.reads_gradients:
        seen.unscaled.refuse(_unscaled)


def refuse_unscaled(optimizer: Optimizer, unscaled: Unscaled) -> None:
    """Before a step: gradients that somebody has divided by what the loss was multiplied by. A GradScaler says so."""
    if not hasattr(optimizer, "found_inf"):
        unscaled.refuse(_unscaled)


def _unscaled(factor: float) -> str:
    return (
        f"the loss was multiplied by {factor:g}, and its gradients were divided by {factor:g} afterwards, but what was "
        "gathered beside them was not. Declare the scale instead and leave the gradients as they are: with "
        f"optimizer.sampled(scale={factor:g}); or let a torch.amp.GradScaler do both."
    )


def require_samples(gathered: StepStatistics, wanted: int) -> None:
    """A step needs as many samples as were asked for."""
    if gathered.samples == 0:
        raise CallOrderError(
            "no gradient sample was taken. Wrap forward and backward in `with optimizer.sampled():`, or pass a "
            "closure to step."
        )
    if gathered.samples != wanted and not gathered.vectorized:
        raise CallOrderError(
            f"{gathered.samples} sample(s) were taken where mc_samples={wanted}. Open that many sampled() blocks with "
            "a backward pass in each, or pass a closure to step. Blocks that are micro-batches of one update: call "
            "optimizer.accumulate(n) once and step after each, every loss the mean over its own micro-batch."
        )


def count_refused(counters: dict[str, int]) -> None:
    """A non-finite step is counted and forgotten; too many in a row are an error."""
    counters["refused"] += 1
    counters["refused_in_a_row"] += 1
    if counters["refused_in_a_row"] >= MAX_REFUSED:
        raise NonFiniteError(
            f"{MAX_REFUSED} steps in a row had a non-finite loss, gradient or squared gradient and were refused. "
            "The mean is the last good one. Lower lr, raise damping, or look at the data; diagnostics() may help."
        )
