"""What all optimisers with a posterior share: blocks in which the weights are a sample, and steps.

The module holds the mean, except inside a block, where it holds a sample. A block collects the gradient, and what
else the method needs, at its sample; `step` turns what the blocks since the last step have collected into one update.

A method says four things: how a sample is drawn (`_draw`), what is observed at it (`_observe`), how the mean and what
is known of it change (`_update`), and what is believed then (`posterior`).
"""

import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from operator import is_
from types import TracebackType
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from credo.curvature.loss_factor import Unscaled
from credo.curvature.torch_private import (
    DisableTorchFunction,
    global_post_hooks,
    global_pre_hooks,
    profiler_runs,
)
from credo.curvature.tracking import WatchedParameters
from credo.curvature.uncompiled import COMPILER, Uncompiled
from credo.errors import CallOrderError, EmptyBatch
from credo.optim import arguments, checks, monitor
from credo.optim.closures import finish_closure
from credo.optim.groups import RunningStatistics, parameter_names
from credo.optim.relative import can_average
from credo.optim.socket import Socket
from credo.optim.statistics import Observation, StepStatistics
from credo.posterior import Posterior

Step = TypeVar("Step", bound=Callable[..., Any])


def hooked(step: Step) -> Step:
    """For the `step` of an optimiser. torch would wrap it at construction; a name that nobody reads takes a while."""
    watched = Optimizer.profile_hook_step(step)

    @wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        # A subclass's own step has been wrapped by torch, and hooks must not run twice.
        if (hooks or global_pre_hooks or global_post_hooks or profiler_runs()) and type(self).step is run:
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    run.hooked = True  # type: ignore[attr-defined]  # which torch asks for
    return cast(Step, run)


class BayesianOptimizer(Socket):
    """A torch optimiser whose state is a posterior."""

    _block: object = None  # what only the block that was opened last knows
    _left: dict[int, tuple[Any, int]]  # what the last step left in .grad: by id, the tensor and its version
    _unfinished = False  # whether a closure was begun and did not come to its end
    _trains_with_noise = True  # whether gradients are taken at samples
    _updates_from_backup = False  # whether `_update` finds means that are still away

    # What a method says

    @abstractmethod
    def _draw(self, draw: int) -> int:
        """Turns the means in the parameters into sample number `draw`; returns how many draws that were."""

    @abstractmethod
    def _observe(self, watched: WatchedParameters) -> AbstractContextManager[Observation]:
        """A block in which the backward passes are seen."""

    @abstractmethod
    def _update(self, gathered: StepStatistics) -> bool:
        """The update, from numbers with the loss scale still in them; False and no change if they are not finite."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """What is believed now, independent of the optimiser from here on."""

    def _catch_up(self) -> None:
        """For a rank that has drawn nothing in a step: its part in what the others have drawn together."""

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """For `vectorized`: the closure at all samples of a step at once; the mean of its losses."""
        raise NotImplementedError

    # Blocks

    def sampled(self, *, scale: float | None = None) -> AbstractContextManager[None]:
        """A block in which the weights are a sample; a backward pass in it is one sample of the step.

        Several backward passes in it are micro-batches of one batch, each with its share of the mean loss.
        A block without one is a look. `scale` declares what the loss is multiplied by, for those who let a
        GradScaler unscale the gradients before the step.
        """
        if scale is not None:
            arguments.number("scale", scale, 0, float("inf"), open_low=True)
        return self._sampled(scale)

    @contextmanager
    def _sampled(self, scale: float | None) -> Iterator[None]:
        if self._gathered.samples == 0:
            if self._foreign():
                checks.refuse_foreign_gradients()
            if not self._held.batches:
                self._held.first_draw = self.counters["draws"]
        with Block(self, scale):
            yield

    @final
    def _gather(
        self,
        seen: Observation,
        parameters: list[Tensor],
        before: list[Tensor | None] | None,
        scale: float | None,
    ) -> int:
        """`.grad` is the sum over the samples so far, so that clipping and unscaling find it where they look.

        `before` are the sums without this one; there are none if it is the first. Returns how many examples there were.
        """
        examples, irregular = seen.examples, seen.irregular
        if irregular is not None:
            checks.refuse_changed_gradients(irregular, self._gathered, scale)
        if examples:
            for p in parameters:
                if p.grad is None:
                    module = self._module_now() if self._shards is None else None
                    checks.refuse_replaced(module, parameters, self.names)
                    break
            self._gathered.add(seen, parameters, examples, scale)
            if scale is None and seen.loss is not None:
                self._monitor.noted.append(seen.loss)
        for p, grad in zip(parameters, before, strict=True) if before else ():
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
        if irregular is not None:
            self._gathered.factors = irregular.factors if irregular.passes == 1 else ()
            self._gathered.unscaled = Unscaled(irregular.outer, parameters)
        return examples

    @final
    def _end_block(self) -> None:
        """Puts the means back, unless an update follows at once."""
        if self._running is not None and self._running.changed:
            self._running.restore()
        if self._backup.away and not self._backup.late:
            self._backup.restore()

    @final
    def _slow_statistics(self) -> None:
        """Where the mean is an average of iterates, running statistics are averages over the same steps."""
        if self._running is None:
            averages = self.settings.get("averaging", 0.0) and any(map(can_average, self.param_groups))
            self._running = RunningStatistics(self._module_now() if averages else None)
        if self._running.layers:
            self._running.slow(self._averaging_weight() / self.settings["mc_samples"])

    @final
    def _averaging_weight(self) -> float:
        """w of the iterate in a mean that is an average of iterates, at this step; 1 without an average."""
        eta = self.settings.get("averaging", 0.0)
        return float((eta + 1) / (self.counters["step"] + 1 + eta)) if eta else 1.0

    # Steps

    @final
    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, but no name for a profiler that does not run; a block need not see the many small questions."""
        with DisableTorchFunction():
            if not set_to_none or profiler_runs():
                super().zero_grad(set_to_none)
            for group in self.param_groups if set_to_none else ():
                for p in group["params"]:
                    p.grad = None
            if not self._reducer.alone:
                self._reducer.zero_grad()

    @hooked
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One update from the samples since the last one; with a closure, from K samples taken now.

        The closure clears the gradients, computes the loss, calls backward and returns the loss. Or it
        returns the losses of the examples, shape (M,), and leaves backward to the optimiser. The mean of the
        loss over the samples is returned. A step with a non-finite loss, gradient or square is refused: nothing
        changes, `counters["refused"]` grows, and after ten in a row it is an error.
        """
        if self._inside is not None:
            self._refuse_inside("step")
        try:
            self._backup.late = self._updates_from_backup and not self._reducer.sharded
            loss = self._step(closure)
        finally:
            self._backup.late = False
            self._end_block()
            if self._inside == threading.get_ident():  # an interrupt as a block began or ended
                self._inside = None
        self._report(loss)
        return loss

    def _step(self, closure: Callable[[], Tensor] | None) -> Tensor | None:
        loss, reducer, samples = None, self._reducer, self.settings["mc_samples"]
        if not reducer.alone:
            reducer.begin_step()
        self._check_changed_settings()
        if self._frozen:
            checks.refuse_thawed(self._frozen, self._members(), self._module_now())
        if closure is not None:
            loss = self._run_closure(closure)
        gathered = self._gathered
        if (reducer.alone or gathered.samples) and gathered.samples != samples and not gathered.vectorized:
            checks.require_samples(gathered, samples)
        if gathered.unscaled is not None:
            checks.refuse_unscaled(self, gathered.unscaled)
        if not reducer.alone and reducer.must_catch_up:
            self._catch_up()
        parameters = self._trainable()
        if self.settings.get("accumulate", 1) != 1 and not self._is_update(parameters):
            self._note_left()
            self._gathered = self._nothing_gathered()
            return loss
        if reducer.alone:
            self._update_or_refuse(loss)
        else:
            noted = gathered.mean_loss() if loss is None else loss
            with torch.no_grad(), reducer.local_view(self):
                loss = reducer.sum_(gathered, parameters, self.settings, self.counters, noted)
                self._update_or_refuse(loss)
        self._note_left()
        return loss

    def _run_closure(self, closure: Callable[[], Tensor]) -> Tensor | None:
        """The closure at K samples; the mean of its losses. What is in `.grad` must be the last step's, or none.

        Where a step was interrupted, what is in `.grad` is what that has left.
        """
        if "accelerate.state" in sys.modules:
            checks.refuse_skipped_closures()
        if self._gathered.samples and not self._unfinished:
            checks.refuse_blocks_and_closure(self._gathered)
        foreign = [] if self._unfinished else [(p, p.grad) for p in self._foreign()]
        self._unfinished = True
        if not self._held.batches:
            self._held.first_draw = self.counters["draws"]
        try:
            loss = self._run_share(checks.clearing(closure, foreign) if foreign else closure)
        except Exception:
            if self._gathered.samples:  # what the samples before the failure have left is no part of any step
                self._gathered = self._nothing_gathered()
                for p in self._trainable():
                    p.grad = None
            for p, grad in foreign:
                p.grad = grad
            self._unfinished = False
            raise  # an interrupt may have come amid anything
        self._unfinished = False
        return loss

    def _run_share(self, closure: Callable[[], Tensor]) -> Tensor | None:
        """Among several processes an empty share of the batch takes part in the step all the same."""
        self._gathered = self._nothing_gathered()
        try:
            if self.settings.get("vectorized") and self.settings["mc_samples"] > 1:
                return self._run_at_once(closure)
            losses = []
            for _ in range(self.settings["mc_samples"]):
                with Block(self, None) as seen:
                    losses.append(self._finish(closure(), seen))
            return losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        except EmptyBatch:
            if self._reducer.alone:
                raise
            self._gathered = self._nothing_gathered()
            return None

    def _finish(self, returned: Any, seen: Observation) -> Tensor:
        """The loss as one detached number; runs the backward pass if the closure left it to the optimiser."""
        if seen.examples and isinstance(returned, Tensor):  # the closure has called backward
            with DisableTorchFunction():  # a block need not see this
                if returned.dim() == 0:
                    return returned.detach()
        return finish_closure(returned, seen, self.settings["reduction"])

    def _update_or_refuse(self, loss: Tensor | None) -> None:
        gathered, self._gathered = self._gathered, self._nothing_gathered()
        scaled = hasattr(self, "found_inf")
        scales = checks.loss_scales(self, gathered.scale) if scaled else (gathered.scale or 1.0,) * 2
        gathered.loss, seen = loss, self.counters["examples"]
        gathered.noted = gathered.mean_loss() if loss is None else loss
        gathered.gradient_scale, gathered.squares_scale = scales[0], scales[1] * gathered.share
        mean_loss = self.settings["reduction"] == "mean" or gathered.vectorized
        summed = gathered.samples * (1 if mean_loss else gathered.examples / gathered.samples)
        gathered.gradient_unit = 1 / (summed * gathered.gradient_scale)
        if self.settings.get("averaging"):
            gathered.weight = self._averaging_weight()
        if not self._update(gathered):
            self._monitor.refused(self, gathered, loss)
            checks.count_refused(self.counters)
            return
        if "likelihood" in self.counters:
            if self.counters["step"] == 0:
                self.counters["likelihood"] = self._reducer.largest(int(gathered.likelihood))
            self.counters["examples"] += gathered.examples // self._repeats(gathered)  # each of a step once
        passes, noted = (self.counters["examples"] - seen) / self.data_size, gathered.noted
        known = gathered.number if noted is None or gathered.number is not None else float(noted)
        self._progress.follow(None if known is None else known / gathered.squares_scale, passes)
        self.counters["step"] += 1
        self.counters["refused_in_a_row"] = 0

    def _report(self, loss: Tensor | None) -> None:
        """Losses are put by and read fifty at a time, and layers are looked at now and then."""
        own, counters = self._monitor, self.counters
        noted, own.noted = own.noted, []
        if counters["refused_in_a_row"]:
            return
        if loss is None and noted and not hasattr(self, "found_inf"):  # else a scaler has scaled them
            loss = noted[0] if len(noted) == 1 else torch.stack(noted).mean()
        if loss is not None:
            own.losses.append(float(loss) if loss.is_cpu else loss)
        if len(own.losses) >= monitor.WINDOW or counters["step"] >= own.next_look:
            own.look(self)

    @final
    def _repeats(self, gathered: StepStatistics) -> int:
        """How many samples, and ranks of its group, have seen each example of a step."""
        at_once: int = self.settings["mc_samples"] if self.settings.get("vectorized") else 1
        reducer, groups = self._reducer, self.settings.get("mc_groups")
        return gathered.samples * at_once * (1 if reducer.alone else reducer.readers(groups))

    @final
    def _finite(self, gathered: StepStatistics) -> bool:
        """Whether all numbers of a step are, on all ranks."""
        return self._reducer.all(gathered.finite(self._trainable(), gathered.loss))

    # What is kept between steps

    @final
    def _check_changed_settings(self) -> None:
        """Options that a scheduler or somebody's hand has put into the groups; those of the last step are known."""
        if len(self._checked) != len(self.param_groups):
            self._checked = [()] * len(self.param_groups)
            present = set(map(id, self.param_groups))  # what is kept of a group goes with it
            self._lists = {key: own for key, own in self._lists.items() if key[0] in present}
        for k, group in enumerate(self.param_groups):
            values = (*group.values(),)
            known = len(values) == len(self._checked[k]) and all(map(is_, values, self._checked[k]))
            if not known or isinstance(group["lr"], Tensor):
                lr = group["lr"]
                rounded = isinstance(lr, float) and -1e-9 < lr < 0  # as schedulers leave it near zero
                self._check_group({**group, "lr": 0.0} if rounded else group)
                self._checked[k] = values

    def _nothing_gathered(self) -> StepStatistics:
        """What is known at the beginning of a step."""
        return self._statistics()

    @final
    def _note_left(self) -> None:
        """The gradients that a step leaves in `.grad`, so that they are known when they are met again."""
        left = [grad for p in self._members() if (grad := p.grad) is not None]
        self._left = {id(grad): (weakref.ref(grad), grad._version) for grad in left}

    @final
    def _foreign(self) -> list[Tensor]:
        """The parameters with a gradient that no block took; the last step's own leftovers are none."""
        unknown, left = (lambda: None, -1), self._left
        found = []
        for p in self._trainable():
            if (grad := p.grad) is not None:
                held, version = left.get(id(grad), unknown)
                if (held() is not grad or version != grad._version) and bool(grad.any()):
                    found.append(p)
        return found

    @property
    def data_size(self) -> float:
        """ρN, the effective number of examples."""
        return float(self.settings["data_size"] * self.settings["augmentation"])

    def _members(self) -> list[Tensor]:
        """All parameters, frozen ones too; none before there are groups."""
        return [p for group in getattr(self, "param_groups", ()) for p in group["params"]]

    @final
    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @final
    def _stream(self, draw: int | None = None) -> int:
        """The number of a draw among all ranks', by default this rank's next; they may share one row of samples."""
        own = 0 if self.settings.get("shared_noise") else self._reducer.stream
        return own | (self.counters["draws"] if draw is None else draw)

    @final
    def _subjects(self, parameters: list[Tensor]) -> WatchedParameters:
        """For a block that watches these.

        It must not hold the optimiser, which holds it: garbage for the collector would be the end of both.
        """
        known, reducer = self._watched, self._reducer
        seen = parameters if reducer.alone else reducer.seen(parameters)
        own = () if known is None else known.subjects
        if known is None or len(own) != len(seen) or not all(map(is_, own, seen)):
            names = partial(parameter_names, self.param_groups)
            members = self._members() if reducer.alone else reducer.seen(self._members())
            self._watched = known = WatchedParameters(seen, members, names, self._module)
            if not reducer.alone:
                reducer.watch(known)
        return known


@final
class Block(AbstractContextManager[Observation]):
    """One sample of a step: a block in which the weights are that sample, and whose backward passes are seen.

    Gradients begin at none in it. If it fails they are what they were before; else the sums over samples so far.
    """

    def __init__(self, optimizer: BayesianOptimizer, scale: float | None):
        self._open = False
        self._optimizer, self._scale, self._token = optimizer, scale, object()

    def __enter__(self) -> Observation:
        own = self._optimizer
        if own._inside is not None:
            own._refuse_inside("open a sampling block")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            told = "gradients are switched off (no_grad or inference_mode) around a sampling block."
            raise CallOrderError(told)
        if not own._reducer.alone:
            own._reducer.open_block(own.settings["reduction"])
        self._parameters = own._trainable()
        self._before = [p.grad for p in self._parameters] if own._gathered.samples else None
        watched = own._subjects(self._parameters)
        try:
            self._open, own._block, own._inside = True, self._token, threading.get_ident()
            for p in self._parameters:
                p.grad = None
            self._draws = own._draw(own._stream())
            if own._running is None or own._running.layers:
                own._slow_statistics()
            watching = own._observe(watched)
            self._watching = Uncompiled(watching) if COMPILER in sys.modules else watching
            self._seen = self._watching.__enter__()
            return self._seen
        except BaseException as error:
            self._give_up(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own, examples = self._optimizer, -1
        try:
            try:
                self._watching.__exit__(kind, error, trace)
                del self._watching
            finally:
                own._end_block()
            if kind is None:
                own.counters["draws"] += self._draws
                if not own._reducer.alone:
                    own._reducer.collect(self._seen, own._gathered.localise)
                examples = own._gather(self._seen, self._parameters, self._before, self._scale)
        finally:  # also after an interrupt: nobody else would open the optimiser again
            self._open, own._inside = False, None
            if examples < 0:
                self._give_up(error)
            elif not own._reducer.alone:
                own._reducer.close_block(None)
        if examples < 1 and own._shards is None:
            checks.refuse_sharded_since(own._module_now(), own.names, error)
        if examples > own.settings["data_size"] and not own._warned:
            checks.warn_of_small_data(examples, own.settings["data_size"])
            own._warned = True

    def __del__(self) -> None:
        # An interrupt came before the end could; unless a traceback has kept this one until after the next was opened.
        if self._open and self._optimizer._block is self._token:
            self._give_up()

    def _give_up(self, error: BaseException | None = None) -> None:
        own = self._optimizer
        own._end_block()
        self._open, own._inside = False, None
        if not own._gathered.samples:  # it may have been on the way to become the first
            own._gathered = own._nothing_gathered()
        for k, p in enumerate(self._parameters):
            p.grad = None if self._before is None else self._before[k]
        if not own._reducer.alone:
            own._reducer.close_block(error or RuntimeError("a block that did not end"))
