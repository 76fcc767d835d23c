"""All that changes while a run trains, in one place: what is not here is a function of the recipe and the seed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from credo.data.batches import Batches
from credo.errors import InvalidValue
from credo.experiments.learners import BatchLearner, Outcome
from credo.experiments.ranks import Ranks, seed_device
from credo.experiments.run_folder import LogRow
from credo.experiments.watchers import Watcher
from credo.optim import TemperingSchedule

BUFFER: Final = "buffer."


class Work(ABC):
    """What a run does, step by step: a single task, or a stream of tasks. The loop saves and stops in between."""

    title: str
    epochs: int
    steps_per_epoch: int  # of a stream of tasks on average
    ranks: Ranks

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Whole epochs that are behind it."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Steps taken so far."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that changes, the same on all ranks, which must all call this."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on from there; refuses the state of another run before anything is changed."""

    @abstractmethod
    def begin(self, resumed: bool, drift: list[str]) -> None:
        """Before the first step: what the folder must tell. `drift`: in which settings a resumed run differs."""

    def confirm(self) -> None:  # noqa: B027
        """After the first save: an error on a rank that does not see the folder."""

    @abstractmethod
    def steps(self, watcher: Watcher) -> Iterator[bool]:
        """Goes on to the end, and yields after every step and evaluation; True where the state must be saved."""

    @abstractmethod
    def finish(self) -> None:
        """Writes what a finished run leaves, the result last."""


class Running:
    """Sums over the epoch under way, on the model's device: reading them at every step would wait for it."""

    def __init__(self, device: torch.device | str) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, examples
        self.seconds = 0.0

    def add(self, outcome: Outcome, examples: int) -> None:
        self.sums[0] += outcome.loss.double() * examples
        self.sums[1] += outcome.hits
        self.sums[2] += examples

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Over the examples of all ranks."""
        loss, hits, examples = ranks.total(self.sums).tolist()
        return {"train_accuracy": hits / examples, "train_nll": loss / examples}

    def reset(self) -> None:
        self.sums.zero_()
        self.seconds = 0.0


class RunState:
    """Exact at every step boundary: weights, optimiser, τ, data position, random streams, sums, log.

    Ranks are equal but for what each has seen by itself: its streams, its sums, and the buffers of its normalisation
    layers. A checkpoint holds these of every rank, and what they come to together, for another number of ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        learner: BatchLearner,
        tempering: TemperingSchedule | None,
        batches: Batches,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.model, self.learner, self.tempering, self.batches = model, learner, tempering, batches
        self.device, self.ranks = device, ranks
        self.step = 0  # taken so far
        self.epoch = 0  # trained, evaluated and logged
        self.running = Running(device)
        self.log: list[LogRow] = []

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, which must all call this."""
        parts = [] if self.ranks.alone else self.ranks.gathered(self._own())
        return {
            "step": self.step,
            "epoch": self.epoch,
            "model": {**self.model.state_dict(), **averaged_buffers(parts)},
            "learner": self.learner.state_dict(),
            "tempering": None if self.tempering is None else self.tempering.state_dict(),
            "batches": self.batches.state_dict(),
            "random": random_state(self.device),
            "sums": self.ranks.total(self.running.sums),
            "seconds": self.running.seconds,
            "log": self.log,
            "ranks": parts,  # one for each; none if there was only one
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Checks that the saved model is this one before anything is changed."""
        check_same_model(self.model, saved["model"])
        self.batches.load_state_dict(saved["batches"])
        self.learner.load_state_dict(saved["learner"])
        self.model.load_state_dict(saved["model"])
        if self.tempering is not None and saved["tempering"] is not None:
            self.tempering.load_state_dict(saved["tempering"])
        self.running.sums.copy_(saved["sums"])
        self.running.seconds = saved["seconds"]
        self.step, self.epoch, self.log = saved["step"], saved["epoch"], saved["log"]
        set_random_state(self.device, saved["random"])
        self._load_own(saved.get("ranks", []))

    def _own(self) -> dict[str, Tensor]:
        """What this rank does not share with the others, by name."""
        streams = {f"random.{name}": state for name, state in random_state(self.device).items()}
        saved = self.model.state_dict()
        buffers = {f"{BUFFER}{name}": b for name, b in self.model.named_buffers() if name in saved}
        return {"sums": self.running.sums, **streams, **buffers}

    def _load_own(self, parts: list[dict[str, Tensor]]) -> None:
        """After all that is shared has been loaded."""
        own = self.ranks.own_part(parts)
        if own is not None:
            self.running.sums.copy_(own["sums"])
            set_random_state(
                self.device,
                {name.removeprefix("random."): own[name] for name in own if name.startswith("random.")},
            )
            buffers = dict(self.model.named_buffers())
            for name in (name for name in own if name.startswith(BUFFER)):
                buffers[name.removeprefix(BUFFER)].copy_(own[name])
        elif parts or not self.ranks.alone:
            self._start_with_others(max(len(parts), 1))

    def _start_with_others(self, before: int) -> None:
        """Another number of ranks than saved: the sums stay with rank 0, and the others begin new streams."""
        self.ranks.warn_of_another_number(before)
        if not self.ranks.is_first:
            self.running.sums.zero_()
        self.ranks.part_streams(self.device, self.batches.seed, self.step)


def averaged_buffers(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means over the ranks; whole numbers are rank 0's."""
    names = [name for name in (parts[0] if parts else {}) if name.startswith(BUFFER)]
    return {
        name.removeprefix(BUFFER): (
            torch.stack([part[name].double() for part in parts]).mean(0).to(parts[0][name].dtype)
            if parts[0][name].is_floating_point()
            else parts[0][name]
        )
        for name in names
    }


def check_same_model(model: nn.Module, saved: dict[str, Tensor]) -> None:
    own = model.state_dict()
    wrong = [f"{name!r} is in only one of them" for name in sorted(own.keys() ^ saved.keys())]
    for name in sorted(own.keys() & saved.keys()):
        if own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype:
            pair = [f"{tuple(t.shape)} {t.dtype}" for t in (saved[name], own[name])]
            wrong.append(f"{name!r} was saved as {pair[0]} and is {pair[1]} here")
    if wrong:
        raise InvalidValue(f"the checkpoint belongs to another model: {'; '.join(wrong[:5])}.")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The global streams, which dropout draws from: the CPU's, and the device's if it has one of its own."""
    states = {"cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(device: torch.device, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


@contextmanager
def private_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """torch's global streams, seeded for this run and put back after it."""
    accelerated = device.type not in ("cpu", "meta")
    devices = [device.index or 0] if accelerated else []
    with torch.random.fork_rng(devices, device_type=device.type if accelerated else "cuda"):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            seed_device(device, seed)
        yield
