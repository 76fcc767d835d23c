"""What all optimisers with a posterior share: blocks in which the weights are a sample, steps, and state.

The module holds the mean, except inside a block, where it holds a sample. A block collects the gradient, and what
else the method needs, at its sample; `step` turns what the blocks since the last step have collected into one update.

A method says four things: how a sample is drawn (`_draw`), what is observed at it (`_observe`), how the mean and what
is known of it change (`_update`), and what is believed then (`posterior`).
"""

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn

from credo.curvature.loss_factor import Unscaled
from credo.curvature.torch_private import DisableTorchFunction
from credo.curvature.tracking import WatchedParameters, buffers_of
from credo.distributed import World, world
from credo.distributed.agreement import synchronise_start
from credo.distributed.sharding import ElementShards, Shards, gathered
from credo.errors import CallOrderError, EmptyBatch
from credo.kernels.tensors import TensorList
from credo.optim import arguments, checkpoints, checks
from credo.optim.accumulation import Accumulating, Held
from credo.optim.blocks import Block, finish_closure, hooked, profiler_runs
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import Diagnosed
from credo.optim.groups import carrying_buffers, joining_group, parameter_groups, parameter_names, take_prior
from credo.optim.habits import Answering
from credo.optim.means import MeanBackup
from credo.optim.monitor import Monitor
from credo.optim.progress import Progress
from credo.optim.relative import TensorNumbers, is_relative, numbers, share_noise, start_scale
from credo.optim.statistics import Observation, StepStatistics
from credo.posterior import Posterior

# The settings that methods share, and how each is checked.
SHARED: dict[str, Callable[[Any], Any]] = {
    "data_size": lambda given: arguments.whole("data_size", given, 1),  # N
    "augmentation": lambda given: arguments.number("augmentation", given, 1, math.inf),  # ρ
    "mc_samples": lambda given: arguments.whole("mc_samples", given, 1),  # K
    "reduction": lambda given: arguments.option("reduction", given, ("mean", "sum")),
    "seed": arguments.seed,
    "vectorized": bool,
    "shared_noise": bool,
    "sharded": bool,
    "mc_groups": arguments.groups_of_ranks,
}


class BayesianOptimizer(Answering, Accumulating, Diagnosed, ABC):
    """A torch optimiser whose state is a posterior.

    Tunables are in `param_groups`, learned values in `state[p]`; `settings` hold for all groups and
    `counters` count. All of them survive `state_dict`, `deepcopy` and pickling.
    """

    _step_supports_amp_scaling = True  # a GradScaler then tells its scale at the step
    _inside: int | None  # the thread that is inside a block
    _block: object = None  # what only the block that was opened last knows
    _left: checks.Left  # what the last step left in .grad
    _frozen: tuple[Tensor, ...] = ()  # of the module, when it was given
    _unfinished = False  # whether a closure was begun and did not come to its end
    _warned: bool
    _checked: list[tuple[Any, ...]]  # the options of each group that were found in range
    _watched: WatchedParameters | None  # whom the last block watched
    _lists: dict[tuple[int, str], TensorList]
    _monitor: Monitor
    _backup: MeanBackup
    _world: World
    _shards: Shards
    _kind_of_shards: type[Shards] = ElementShards
    _kept: tuple[str, ...] = ()  # further attributes that copies have too
    _trains_with_noise = True  # whether gradients are taken at samples
    _updates_from_backup = False  # whether `_update` finds means that are still away

    def __init__(
        self, params: Any, defaults: dict[str, Any], settings: dict[str, Any], prior: Posterior | None = None
    ):
        """`defaults` are those of a parameter group; `settings` hold for all groups."""
        self.settings = {n: SHARED[n](given) if n in SHARED else given for n, given in settings.items()}
        self.counters = {"step": 0, "draws": 0, "refused": 0, "refused_in_a_row": 0, "examples": 0}
        if "relative_lr" in defaults:
            self.counters["likelihood"] = 0  # whether the first loss was one
        self._progress = Progress()
        self._module = weakref.ref(params) if isinstance(params, nn.Module) else None
        if isinstance(params, nn.Module):
            self._frozen = tuple(p for p in params.parameters() if not p.requires_grad)
        self._start_afresh()
        super().__init__(parameter_groups(params), {**defaults, "deterministic": False})
        self._left = checks.Left(self._members())  # what is older than the optimiser is not meant for it
        synchronise_start(self, self._module_now())
        self._monitor.begin(self)
        share_noise(self.param_groups, self.defaults)
        if prior is not None:
            take_prior(self, prior)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "posterior" in vars(cls):
            cls.posterior = carrying_buffers(cls.posterior)  # type: ignore[method-assign]

    # What a method says

    @abstractmethod
    def _draw(self, draw: int) -> int:
        """Turns the means in the parameters into sample number `draw`; returns how many draws that were."""

    @abstractmethod
    def _observe(self, parameters: list[Tensor]) -> AbstractContextManager[Observation]:
        """A block in which the backward passes are seen."""

    @abstractmethod
    def _update(self, gathered: StepStatistics) -> bool:
        """The update, from numbers with the loss scale still in them; False and no change if they are not finite."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """What is believed now, independent of the optimiser from here on."""

    @abstractmethod
    def _nothing_gathered(self) -> StepStatistics:
        """What is known at the beginning of a step."""

    @abstractmethod
    def _uncertain(self) -> object:
        """What samples are drawn from; ranks that have parts of it put them together here."""

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
            checks.refuse_foreign_gradients(self._trainable(), self._left)
            self._held.begin(self.counters["draws"])
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
                    checks.refuse_replaced(self._module_now(), parameters, self.names)
                    break
            self._gathered.add(seen, parameters, examples, scale)
            if scale is None:
                self._monitor.note(seen)
        for p, grad in zip(parameters, before, strict=True) if before else ():
            if grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
        if irregular is not None:
            self._gathered.factors = irregular.factors if irregular.passes == 1 else ()
            self._gathered.unscaled = Unscaled(irregular.outer, parameters)
        return examples

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
            self._backup.late = self._updates_from_backup and not self._shards.sharded
            loss = self._step(closure)
        finally:
            self._backup.restore()
            if self._inside == threading.get_ident():  # an interrupt as a block began or ended
                self._inside = None
        self._monitor.look(self, loss)
        return loss

    def _step(self, closure: Callable[[], Tensor] | None) -> Tensor | None:
        loss, alone = None, self._world.alone
        self._check_changed_settings()
        if self._frozen:
            checks.refuse_thawed(self._frozen, self._members(), self._module_now())
        if closure is not None:
            checks.refuse_skipped_closures()
            with checks.Clearing(self, closure) as cleared:
                loss = self._run_share(cleared)
        if alone or self._gathered.samples:
            checks.require_samples(self._gathered, self.settings["mc_samples"])
            if self._gathered.unscaled is not None:
                checks.refuse_unscaled(self, self._gathered.unscaled)
        if not alone and self._shards.must_catch_up:
            self._uncertain()
        if not self._is_update(parameters := self._trainable()):
            self._gathered = self._nothing_gathered()
            return loss
        if alone:
            self._update_or_refuse(loss)
        else:
            noted = self._gathered.mean_loss() if loss is None else loss
            with torch.no_grad(), self._shards.local_view(self):
                loss = self._gathered.share(self._shards, parameters, self.settings, self.counters, noted)
                self._update_or_refuse(loss)
        self._left = checks.Left(self._members())
        return loss

    def _run_share(self, closure: Callable[[], Tensor]) -> Tensor | None:
        """The closure at K samples; the mean of its losses.

        Among several processes an empty share of the batch takes part in the step all the same.
        """
        self._gathered = self._nothing_gathered()
        try:
            if self.settings.get("vectorized"):
                return self._run_at_once(closure)
            losses = []
            for _ in range(self.settings["mc_samples"]):
                with Block(self, None) as seen:
                    losses.append(finish_closure(closure(), seen, self.settings["reduction"]))
            return losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        except EmptyBatch:
            if self._world.alone:
                raise
            self._gathered = self._nothing_gathered()
            return None

    def _update_or_refuse(self, loss: Tensor | None) -> None:
        gathered, self._gathered = self._gathered, self._nothing_gathered()
        gathered.loss, seen = loss, self.counters["examples"]
        gathered.gradient_scale, gathered.squares_scale = checks.loss_scales(self, gathered.scale)
        if not self._update(gathered):
            self._monitor.refused(self, gathered, loss)
            checks.count_refused(self.counters)
            return
        if "likelihood" in self.counters:
            if self.counters["step"] == 0:
                self.counters["likelihood"] = self._world.largest(int(gathered.likelihood))[0]
            self.counters["examples"] += gathered.examples // self._repeats(gathered)  # each of a step once
        noted = gathered.mean_loss() if loss is None else loss
        passes = (self.counters["examples"] - seen) / self.data_size
        self._progress.follow(None if noted is None else float(noted) / gathered.squares_scale, passes)
        self.counters["step"] += 1
        self.counters["refused_in_a_row"] = 0

    @final
    def _repeats(self, gathered: StepStatistics) -> int:
        """How many samples, and ranks of its group, have seen each example of a step."""
        groups = self.settings.get("mc_groups") or self._world.size
        at_once: int = self.settings["mc_samples"] if self.settings.get("vectorized") else 1
        return gathered.samples * at_once * int(self._world.size // groups)

    @final
    def _growth(self) -> float:
        """What the noise of the default rule is multiplied by; under an error of unknown scale it stays as it is."""
        return self._progress.growth if self.counters.get("likelihood") else 1.0

    @final
    def _finite(self, gathered: StepStatistics) -> bool:
        """Whether all numbers of a step are, on all ranks."""
        return self._shards.all(gathered.finite(self._trainable(), gathered.loss))

    # The numbers of a parameter

    @final
    def _numbers_of(self, group: Mapping[str, Any], p: Tensor) -> TensorNumbers:
        """α, γ, τ and δ of one parameter, which may not have seen data yet."""
        scale = None
        if is_relative(group):
            scale = self.state[p].get(SCALE)
            scale = start_scale(p) if scale is None else scale
        return numbers(group, scale, self.data_size, self._growth())

    @final
    def _shrinkage(self, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ = τδ/N, a number or, under a posterior as prior, one a weight; none for normalisation layers."""
        if group["deterministic"]:
            return 0.0
        own = self._numbers_of(group, p)
        precision: float | Tensor = self.state[p].get("prior_precision", own.prior_precision)
        unit: float = own.tempering / self.data_size
        return precision * unit

    @final
    def _metadata(self, *options: str) -> dict[str, Any]:
        """What a posterior says of where it comes from, with some options of the first group."""
        first, own = self.param_groups[0], self.settings
        known = {"method": type(self).__name__, "data_size": own["data_size"]}
        known |= {"augmentation": own["augmentation"], **{name: first[name] for name in options}}
        return {**known, "step": self.counters["step"]}

    @final
    def _list(self, group: Mapping[str, Any], name: str, tensors: Sequence[Tensor]) -> TensorList:
        """For the kernels, which look at tensors once, as long as nothing about them changes."""
        known = self._lists.get((id(group), name))
        if known is not None and known.stands_for(tensors):
            return known
        found = TensorList(tensors)
        if tensors:
            present = set(map(id, self.param_groups))
            self._lists = {key: own for key, own in self._lists.items() if key[0] in present}
            if not self._shards.sharded:  # sharded, whole states are there for a moment only
                self._lists[id(group), name] = found
        return found

    # State

    @gathered()
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
        self._lists = {}
        self._watched, self._monitor, self._backup = None, Monitor(), MeanBackup()
        self._world = world()
        self._shards = self._kind_of_shards(self._world, bool(self.settings.get("sharded")))

    def _stream(self, rank: int | None = None, draw: int | None = None) -> int:
        """The number of a draw among all ranks', by default this rank's next; they may share one row of samples."""
        own = 0 if self.settings.get("shared_noise") else self._world.rank if rank is None else rank
        return own << 48 | (self.counters["draws"] if draw is None else draw)

    def _subjects(self, parameters: list[Tensor]) -> WatchedParameters:
        """For a block that watches these. Buffers are asked for anew: they come and go.

        It must not hold the optimiser, which holds it: garbage for the collector would be the end of both.
        """
        module, known = self._module_now(), self._watched
        constants = [] if module is None else buffers_of(module)
        if known is None or not identical(list(known.watched.values()), parameters):
            names = partial(parameter_names, self.param_groups)
            self._watched = known = WatchedParameters(parameters, constants, names)
        else:
            known.constants = {id(constant): constant for constant in constants} if constants else {}
        return known

    def _refuse_inside(self, what: str) -> None:
        if self._inside is not None:
            raise CallOrderError(
                f"cannot {what} inside a sampling block (on this thread or another): the weights are a sample there. "
                "Leave the block first."
            )


def identical(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two rows hold the same objects. Equal tensors are not enough, and comparing them would take long."""
    return len(one) == len(other) and all(map(is_, one, other))
