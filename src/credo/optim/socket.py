"""What torch asks of an optimiser: groups with options that are checked, state dicts, copies."""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any, final

from torch import Tensor, nn

from credo.curvature.tracking import WatchedParameters
from credo.distributed.agreement import synchronise_start
from credo.distributed.fully_sharded import FullyShardedReducer, refuse_waiting, refuse_with_shards
from credo.distributed.parallel import inner_module
from credo.distributed.sharding import ElementReducer, Reducer, gathered
from credo.distributed.shards import Shards, shards_of
from credo.distributed.world import world
from credo.errors import CallOrderError, UnsupportedOperation
from credo.kernels.tensors import MeanBackup, TensorList
from credo.optim import arguments, checkpoints
from credo.optim.accumulation import Accumulating, Held
from credo.optim.diagnostics import Diagnosed
from credo.optim.groups import (
    RunningStatistics,
    carrying_buffers,
    joining_group,
    parameter_groups,
    take_prior,
)
from credo.optim.habits import Answering
from credo.optim.monitor import Monitor
from credo.optim.relative import share_noise
from credo.optim.statistics import Progress, SquareStatistics, StepStatistics
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


# What they are where a method says nothing about them.
USUAL: dict[str, Any] = {"augmentation": 1.0, "mc_samples": 1, "reduction": "mean", "seed": 0}


class Socket(Answering, Accumulating, Diagnosed, ABC):
    """The part of an optimiser that torch, schedulers and checkpoints see.

    Tunables are in `param_groups`, learned values in `state[p]`; `settings` hold for all groups and `counters` count.
    All of them survive `state_dict`, `deepcopy` and pickling.
    """

    _step_supports_amp_scaling = True  # a GradScaler then tells its scale at the step
    _inside: int | None  # the thread that is inside a block
    _frozen: tuple[Tensor, ...] = ()  # of the module, when it was given
    _progress: Progress
    _reducer: Reducer
    _monitor: Monitor
    _kind_of_reducer: type[Reducer] = ElementReducer
    _statistics: type[StepStatistics]  # what a step gathers
    _warned: bool
    _watched: WatchedParameters | None  # whom the last block watched
    _backup: MeanBackup
    _running: RunningStatistics | None  # of the module's normalisation layers, once a block has looked
    _checked: list[tuple[Any, ...]]  # the options of each group that were found in range
    _lists: dict[tuple[int, str], TensorList]
    _kept: tuple[str, ...] = ()  # further attributes that copies have too
    _shards: Shards | None = None  # of a module under fully_shard
    _draws_weights = True  # whether samples are of the weights as such, and no matter of a block's operations

    def __init__(
        self, params: Any, defaults: dict[str, Any], settings: dict[str, Any], prior: Posterior | None = None
    ):
        """`defaults` are those of a parameter group; `settings` hold for all groups."""
        params = inner_module(params)
        settings = settings | {name: usual for name, usual in USUAL.items() if name not in settings}
        self.settings = {n: SHARED[n](given) if n in SHARED else given for n, given in settings.items()}
        self.counters = {"step": 0, "draws": 0, "refused": 0, "refused_in_a_row": 0, "examples": 0}
        if "relative_lr" in defaults:
            self.counters["likelihood"] = 0  # whether the first loss was one
        self._progress = Progress()
        self._module = weakref.ref(params) if isinstance(params, nn.Module) else None
        if isinstance(params, nn.Module):
            self._frozen = tuple(p for p in params.parameters() if not p.requires_grad)
        self._shards = shards_of(params)
        self._start_afresh()
        super().__init__(parameter_groups(params, self._shards), {**defaults, "deterministic": False})
        self._note_left()  # what is older than the optimiser is not meant for it
        synchronise_start(self, self._module_now(), self._reducer)
        self._monitor.begin(self.param_groups, self.names())
        share_noise(self.param_groups, self.defaults)
        if prior is not None:
            with nullcontext() if self._shards is None else self._reducer.whole(self):
                take_prior(self, prior)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "posterior" in vars(cls):
            cls.posterior = carrying_buffers(cls.posterior)  # type: ignore[attr-defined]

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; refuses misspelt options and values out of range."""
        known = {**self.defaults, **param_group}
        arguments.known_options(param_group, self.defaults)
        self._check_group(known)
        super().add_param_group(joining_group(self.param_groups, param_group, self._module_now()))

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses values out of range, by name."""

    def _module_now(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    # State

    @gathered()
    def state_dict(self) -> dict[str, Any]:
        """torch's, with credo's settings and counters; plain numbers and tensors only."""
        self._refuse_inside("save")
        if self._shards is not None:
            refuse_waiting(self.pending())
        saved = super().state_dict()
        own = checkpoints.own_state(type(self).__name__, self.settings, self.counters)
        return {**saved, "credo": {**own, **self._held.state(), "progress": self._progress.state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes exactly; refuses the state of another model or method, and then has changed nothing."""
        self._refuse_inside("load")
        shape_of = self._reducer.shape_of
        checkpoints.check_state(self, type(self).__name__, self.settings, state_dict, shape_of)
        if self._shards is not None:
            refuse_with_shards(type(self).__name__, True, state_dict["credo"]["settings"])
            refuse_waiting(state_dict["credo"].get("held", {}).get("batches", 0), "was saved")
        super().load_state_dict(state_dict)
        checkpoints.restore_dtypes(self, state_dict)
        self.settings.update(state_dict["credo"]["settings"])
        self.counters.update(state_dict["credo"]["counters"])
        self._start_afresh()
        self._held, self._progress = Held.of(state_dict["credo"]), Progress.of(state_dict["credo"])
        self._reducer.cut_state(self)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("copy")
        if self._shards is not None:
            raise UnsupportedOperation(
                "an optimiser on the parameters of fully_shard cannot be copied or pickled: its parameters are this "
                "rank's rows of the module's. Take state_dict() on all ranks, and load it into a new one."
            )
        own = {"settings": dict(self.settings), "counters": dict(self.counters), "_reducer": self._reducer}
        own |= {"_held": self._held, "_progress": copy(self._progress)}
        return {**super().__getstate__(), **own, **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_module"):  # a copy does not know the module, only its parameters
            self._module, held, waiting = None, self._reducer, self._held
            self._start_afresh()
            held.refuse_another_part(self._reducer)
            self._held = waiting

    @final
    def _new_reducer(self) -> Reducer:
        """What this optimiser does together with the other ranks."""
        shards, squares = self._shards, issubclass(self._statistics, SquareStatistics)
        if shards is None:
            return self._kind_of_reducer(world(), bool(self.settings.get("sharded")))
        refuse_with_shards(type(self).__name__, self._kind_of_reducer is ElementReducer, self.settings)
        return FullyShardedReducer(shards, self._draws_weights, squares)

    def _start_afresh(self) -> None:
        """Forgets the samples of the step under way."""
        self._gathered, self._held = self._nothing_gathered(), Held()
        self._inside, self._warned, self._checked = None, False, []
        self._note_left()
        self._lists = {}
        self._watched, self._monitor, self._backup = None, Monitor(), MeanBackup()
        self._running = None
        self._reducer = self._new_reducer()

    @abstractmethod
    def _nothing_gathered(self) -> StepStatistics:
        """What is known at the beginning of a step."""

    @abstractmethod
    def _note_left(self) -> None:
        """Remembers which gradients are there already."""

    @final
    def _metadata(self, *options: str) -> dict[str, Any]:
        """What a posterior says of where it comes from, with some options of the first group."""
        first, own = self.param_groups[0], self.settings
        known = {"method": type(self).__name__, "data_size": own["data_size"]}
        known |= {"augmentation": own["augmentation"], **{name: first[name] for name in options}}
        return {**known, "step": self.counters["step"]}

    def _refuse_inside(self, what: str) -> None:
        if self._inside is not None:
            raise CallOrderError(
                f"cannot {what} inside a sampling block (on this thread or another): the weights are a sample there. "
                "Leave the block first."
            )
