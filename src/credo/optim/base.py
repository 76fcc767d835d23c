"""What all optimisers with a posterior share: blocks in which the weights are a sample, steps, and state.

The module holds the mean, except inside a block, where it holds a sample. A block collects the gradient, and what
else the method needs, at its sample; `step` turns what the blocks since the last step have collected into one update.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn

from credo.curvature.tracking import WatchedParameters
from credo.distributed import World, world
from credo.errors import CallOrderError, EmptyBatch
from credo.optim import arguments, checkpoints, checks
from credo.optim.accumulation import Accumulating, Held
from credo.optim.block import Block
from credo.optim.diagnostics import Diagnosed
from credo.optim.gathering import Gathered, Seen
from credo.optim.groups import carrying_buffers, joining_group, parameter_groups
from credo.optim.habits import Answering
from credo.optim.hooks import hooked
from credo.optim.joining import join
from credo.optim.losses import finish_closure, mean_loss
from credo.optim.monitor import Monitor
from credo.optim.plan import Plans
from credo.optim.progress import Progress
from credo.optim.sampling import MeanKeeper
from credo.optim.shards import ElementShards, Shards, whole
from credo.posterior import Posterior


class BayesianOptimizer(Answering, Accumulating, Diagnosed, ABC):
    """A torch optimiser whose state is a posterior.

    Tunables are in `param_groups`, learned values in `state[p]`; `settings` hold for all groups and
    `counters` count. All of them survive `state_dict`, `deepcopy` and pickling.
    """

    _step_supports_amp_scaling = True  # a GradScaler then tells its scale at the step
    _inside: int | None  # the thread that is inside a block
    _block: object = None  # what only the block that was opened last knows
    _left: checks.Left  # what the last step left in .grad
    _unfinished = False  # whether a closure was begun and did not come to its end
    _warned: bool
    _checked: list[tuple[Any, ...]]  # the options of each group that were found in range
    _world: World
    _shards: Shards
    _kind_of_shards: type[Shards] = ElementShards
    _kept: tuple[str, ...] = ()  # further attributes that copies have too
    _trains_with_noise = True  # whether gradients are taken at samples
    _updates_from_origins = False  # whether `_update` finds means that are still away

    def __init__(self, params: Any, defaults: dict[str, Any], settings: dict[str, Any]):
        self.settings = settings
        self.counters = {"step": 0, "draws": 0, "refused": 0, "refused_in_a_row": 0, "examples": 0}
        self._progress = Progress()
        self._module = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._start_afresh()
        super().__init__(parameter_groups(params), {**defaults, "deterministic": False})
        self._left = checks.Left(self._members())  # what is older than the optimiser is not meant for it
        join(self, self._module_now())
        self._monitor.begin(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "posterior" in vars(cls):
            cls.posterior = carrying_buffers(cls.posterior)  # type: ignore[method-assign]

    @abstractmethod
    def _sample(self, parameters: list[Tensor]) -> AbstractContextManager[Seen]:
        """The weights are sample number `counters["draws"]` for a while, and the backward passes on them are seen."""

    @abstractmethod
    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure at the samples of a step, `_run_in_turn` or all at once; the mean of its losses."""

    @abstractmethod
    def _nothing_gathered(self) -> Gathered:
        """What is known at the beginning of a step."""

    @abstractmethod
    def _update(
        self, gathered: Gathered, gradient_scale: float, squares_scale: float, loss: Tensor | None
    ) -> bool:
        """The update itself, from numbers with the loss scale still in them; False and no change if not `_finite`."""

    @abstractmethod
    def _uncertain(self) -> Sequence[object]:
        """What samples are drawn from; ranks that have parts of it put them together here."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """What is believed now, independent of the optimiser from here on."""

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
            checks.refuse_foreign_gradients(self._trainable(), self._left)
            self._held.begin(self.counters["draws"])
        with Block(self, scale):
            yield

    @final
    def _gather(
        self, seen: Seen, parameters: list[Tensor], before: list[Tensor | None] | None, scale: float | None
    ) -> int:
        """`.grad` is the sum over the samples so far, so that clipping and unscaling find it where they look.

        `before` are the sums without this one; there are none if it is the first. Returns how many examples there were.
        """
        examples = seen.examples
        if examples:
            for p in parameters:
                if p.grad is None:
                    checks.refuse_replaced(self._module_now(), parameters, self.names)
                    break
            self._gathered.add(seen, parameters, examples, scale)
            if scale is None:
                self._monitor.note(seen)
        for p, grad in zip(parameters, before, strict=True) if before else ():
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
        return examples

    # Steps

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
            self._keeper.late = self._updates_from_origins and not self._shards.sharded
            loss = self._step(closure)
        finally:
            self._keeper.restore()
            if self._inside == threading.get_ident():  # an interrupt as a block began or ended
                self._inside = None
        self._monitor.look(self, loss)
        return loss

    def _step(self, closure: Callable[[], Tensor] | None) -> Tensor | None:
        loss, alone = None, self._world.alone
        self._check_changed_settings()
        if closure is not None:
            checks.refuse_skipped_closures()
            with checks.Clearing(self, closure) as cleared:
                loss = self._run_share(cleared)
        if alone or self._gathered.samples:
            checks.require_samples(self._gathered, self.settings["mc_samples"])
        if not alone and self._shards.must_catch_up:
            self._uncertain()
        if not self._is_update(parameters := self._trainable()):
            self._gathered = self._nothing_gathered()
            return loss
        if alone:
            self._update_or_refuse(loss)
        else:
            noted = self._gathered.mean_loss() if loss is None else loss
            with torch.no_grad(), self._shards.standing_in(self):
                loss = self._gathered.share(self._shards, parameters, self.settings, self.counters, noted)
                self._update_or_refuse(loss)
        self._left = checks.Left(self._members())
        return loss

    def _run_share(self, closure: Callable[[], Tensor]) -> Tensor | None:
        """The closure; among several processes an empty share of the batch takes part in the step all the same."""
        try:
            return self._run(closure)
        except EmptyBatch:
            if self._world.alone:
                raise
            self._gathered = self._nothing_gathered()
            return None

    @final
    def _run_in_turn(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure at K samples, one after the other; the mean of its losses."""
        self._gathered = self._nothing_gathered()
        losses = []
        for _ in range(self.settings["mc_samples"]):
            with Block(self, None) as seen:
                losses.append(finish_closure(closure(), seen, self.settings["reduction"]))
        return mean_loss(losses)

    def _update_or_refuse(self, loss: Tensor | None) -> None:
        gathered, self._gathered = self._gathered, self._nothing_gathered()
        scales, seen = checks.loss_scales(self, gathered.scale), self.counters["examples"]
        if self._update(gathered, *scales, loss):
            noted = gathered.mean_loss() if loss is None else loss
            passes = (self.counters["examples"] - seen) / self.data_size
            self._progress.follow(None if noted is None else float(noted) / scales[1], passes)
            self.counters["step"] += 1
            self.counters["refused_in_a_row"] = 0
        else:
            self._monitor.refused(self, gathered, loss)
            checks.count_refused(self.counters)

    @final
    def _count_examples(self, gathered: Gathered) -> None:
        """Each example of a step once."""
        self.counters["examples"] += gathered.examples // self._repeats(gathered)

    @final
    def _repeats(self, gathered: Gathered) -> int:
        """How many samples, and ranks of its group, have seen each example of a step."""
        groups = self.settings.get("mc_groups") or self._world.size
        at_once: int = self.settings["mc_samples"] if self.settings.get("vectorized") else 1
        return gathered.samples * at_once * int(self._world.size // groups)

    @final
    def _growth(self) -> float:
        """What the noise of the default rule is multiplied by; under an error of unknown scale it stays as it is."""
        return self._progress.growth if self.counters.get("likelihood") else 1.0

    @final
    def _finite(self, gathered: Gathered, loss: Tensor | None) -> bool:
        """Whether all numbers of a step are, on all ranks."""
        return self._shards.all(gathered.finite(self._trainable(), loss))

    # State

    @whole()
    def state_dict(self) -> dict[str, Any]:
        """torch's, with credo's settings and counters; plain numbers and tensors only."""
        self._refuse_inside("save")
        saved = super().state_dict()
        own = checkpoints.own_state(type(self).__name__, self.settings, self.counters)
        return {**saved, "credo": {**own, **self._held.state(), "progress": self._progress.state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes exactly; refuses the state of another model or method, and then has changed nothing."""
        self._refuse_inside("load")
        checkpoints.check_state(self, type(self).__name__, self.settings, state_dict)
        super().load_state_dict(state_dict)
        checkpoints.restore_dtypes(self, state_dict)
        self.settings.update(state_dict["credo"]["settings"])
        self.counters.update(state_dict["credo"]["counters"])
        self._start_afresh()
        self._held, self._progress = Held.of(state_dict["credo"]), Progress.of(state_dict["credo"])
        self._shards.cut_state(self)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("copy")
        own = {"settings": dict(self.settings), "counters": dict(self.counters), "_shards": self._shards}
        own |= {"_held": self._held, "_progress": copy(self._progress)}
        return {**super().__getstate__(), **own, **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_module"):  # a copy does not know the module, only its parameters
            self._module, held, waiting = None, self._shards, self._held
            self._start_afresh()
            held.refuse_another_part(self._shards)
            self._held = waiting

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; refuses misspelt options and values out of range."""
        known = {**self.defaults, **param_group}
        arguments.known_options(param_group, self.defaults)
        self._check_group(known)
        super().add_param_group(joining_group(self.param_groups, param_group, self._module_now()))

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses values out of range, by name."""

    @final
    def _check_changed_settings(self) -> None:
        """Options that a scheduler or somebody's hand has put into the groups; those of the last step are known."""
        if len(self._checked) != len(self.param_groups):
            self._checked = [()] * len(self.param_groups)
        for k, group in enumerate(self.param_groups):
            values = (*group.values(),)
            known = len(values) == len(self._checked[k]) and all(map(is_, values, self._checked[k]))
            if not known or isinstance(group["lr"], Tensor):
                lr = group["lr"]
                rounded = isinstance(lr, float) and -1e-9 < lr < 0  # as schedulers leave it near zero
                self._check_group({**group, "lr": 0.0} if rounded else group)
                self._checked[k] = values

    @property
    def data_size(self) -> float:
        """ρN, the effective number of examples."""
        return float(self.settings["data_size"] * self.settings["augmentation"])

    def _start_afresh(self) -> None:
        """Forgets the samples of the step under way."""
        self._gathered, self._held = self._nothing_gathered(), Held()
        self._inside, self._warned, self._checked = None, False, []
        self._left = checks.Left(self._members())
        self._plans, self._monitor = Plans(), Monitor()
        self._keeper = MeanKeeper()
        self._world = world()
        self._shards = self._kind_of_shards(self._world, bool(self.settings.get("sharded")))

    def _stream(self, rank: int | None = None, draw: int | None = None) -> int:
        """The number of a draw among all ranks', by default this rank's next; they may share one row of samples."""
        own = 0 if self.settings.get("shared_noise") else self._world.rank if rank is None else rank
        return own << 48 | (self.counters["draws"] if draw is None else draw)

    def _subjects(self, parameters: list[Tensor]) -> WatchedParameters:
        return self._plans.subjects_for(parameters, self.param_groups, self._module_now())

    def _refuse_inside(self, what: str) -> None:
        if self._inside is not None:
            raise CallOrderError(
                f"cannot {what} inside a sampling block (on this thread or another): the weights are a sample there. "
                "Leave the block first."
            )
