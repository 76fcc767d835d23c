"""torch's wrapper of `step`, which runs hooks and tells the profiler, where there is one or the other."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Step = TypeVar("Step", bound=Callable[..., Any])
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def hooked(step: Step) -> Step:
    """For the `step` of an optimiser. torch would wrap it at construction; a name that nobody reads takes a while."""
    watched = Optimizer.profile_hook_step(step)

    @wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or profiler_runs()
        ) and type(
            self
        ).step is run:  # a subclass's own step has been wrapped by torch, and hooks must not run twice
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    run.hooked = True  # type: ignore[attr-defined]  # which torch asks for
    return cast(Step, run)
