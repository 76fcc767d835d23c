"""Runs of a few milliseconds on several ranks; what the tests of many processes let each rank do."""

import contextlib
import io
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credo.data.examples import Examples, Splits
from credo.experiments import train as loop
from credo.experiments.checkpoint import Checkpointing
from credo.experiments.recipe import Training
from credo.experiments.stopping import Terminated
from credo.experiments.train import train
from credo.experiments.watchers import Watcher
from tests.experiments.small import TRAININGS, blobs


def exact_blobs() -> Splits:
    """In float64. The last batch of 16 has one example: rank 0's share of it is empty."""
    parts = [blobs(n, seed) for n, seed in ((49, 0), (33, 1))]
    return Splits("exact", *(Examples(part.inputs.double(), part.targets) for part in parts), ("r", "g", "b"))


def blobs_with_nan() -> Splits:
    """One example of the training data is not finite."""
    splits = exact_blobs()
    splits.train.inputs[7] = torch.nan  # type: ignore[index]
    return splits


def exact() -> nn.Module:
    """No BatchNorm, which sees each rank's own share."""
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()


EXACT = replace(TRAININGS["vogn"], model=exact, data=exact_blobs)
SHARED = {"lr": 5e-3, "damping": 1e-2, "mc_samples": 2, "shared_noise": True}
METHODS: dict[str, Training] = {
    "vogn": replace(EXACT, settings=SHARED),
    **{
        name: replace(EXACT, method=name, settings=settings, tempering_from=None)
        for name, settings in {
            "ogn": {"lr": 5e-3, "damping": 1e-2},
            "sgd": {"lr": 0.05},
            "adam": {"lr": 0.01, "weight_decay": 1e-3},
            "kfac": {"lr": 5e-3},
            "ivon": {"lr": 0.1, "shared_noise": True},
        }.items()
    },
    "nan for adam": replace(
        EXACT, method="adam", settings={"lr": 0.01}, tempering_from=None, data=blobs_with_nan
    ),
    "nan for vogn": replace(EXACT, settings=SHARED, data=blobs_with_nan),
    "groups": replace(EXACT, method="ogn", settings={"lr": 5e-3, "damping": 1e-2}, mc_groups=1),
}


class Doing(Watcher):
    """Does something at one step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self._step, self._action = step, action

    def stepped(self, step: int) -> None:
        if step == self._step:
            self._action()


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def every_method(rank: int, size: int, folder: Path) -> list[str]:
    """All of METHODS, one after the other, in folders by name."""
    for name, training in METHODS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train(training, 3, folder / name)
        assert result.metrics["epochs"] == training.epochs
    return [str(warning.message) for warning in caught]


def cut_and_resumed(rank: int, size: int, folder: Path, method: str) -> None:
    """Whole; and once more, crashing and being told to stop at several places."""
    training = TRAININGS[method]
    train(training, 3, folder / "whole")
    for step, steps in ((3, 2), (6, 1), (9, 4)):
        with contextlib.suppress(Crash):
            policy = Checkpointing(steps=steps)
            train(training, 3, folder / "cut", watcher=Doing(step, crash), checkpointing=policy)
    train(training, 3, folder / "cut", resume=True)


def told_to_stop(rank: int, size: int, folder: Path) -> list[str]:
    """SIGTERM comes to the last rank only: in a step, and while test data are evaluated."""
    training, ended = TRAININGS["mc_dropout"], []
    train(training, 3, folder / "whole")
    in_a_step = Doing(5, terminate) if rank == size - 1 else None
    ended.append(_end(lambda: train(training, 3, folder / "cut", watcher=in_a_step)))
    ended.append(str(len(list((folder / "cut" / "checkpoint").glob("*step-000000000005")))))
    with _signal_in_evaluation(rank == size - 1):
        ended.append(_end(lambda: train(training, 3, folder / "cut")))
    train(training, 3, folder / "cut", resume=True)
    return ended


@contextlib.contextmanager
def _signal_in_evaluation(here: bool) -> Any:
    real = loop.average_buffers
    if here:
        loop.average_buffers = lambda model: (terminate(), real(model))[1]  # type: ignore[assignment]
    yield
    loop.average_buffers = real


def _end(action: Callable[[], Any]) -> str:
    try:
        action()
    except (Exception, Terminated) as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def mistakes(rank: int, size: int, folder: Path) -> dict[str, str]:
    """What goes wrong on one rank, and must end all of them."""
    training = METHODS["sgd"]

    def data_of_rank_0() -> Splits:
        if rank:
            raise FileNotFoundError("no data on this machine")
        return exact_blobs()

    def wider_on_rank_1() -> nn.Module:
        return nn.Linear(2, 3 + rank).double()

    own = replace(training, data=data_of_rank_0)
    other = replace(training, model=wider_on_rank_1)
    train(training, 3, folder / "there")
    found = {
        "finished otherwise": _end(lambda: train(replace(training, batch_size=8), 3, folder / "there")),
        "in use": _end(lambda: train(training, 3, folder / "in use")),
        "data": _end(lambda: train(own, 3, folder / "data")),
        "model": _end(lambda: train(other, 3, folder / "model")),
        "credo's model": _end(
            lambda: train(replace(other, method="ogn", settings={}), 3, folder / "credo's model")
        ),
        "seed": _end(lambda: train(training, rank, folder / "seed")),
        "damaged": _end(lambda: train(training, 3, folder / "damaged")),
        "unseen": _end(lambda: train(training, 3, folder / ("unseen" if rank == 0 else "elsewhere"))),
        "groups": _end(lambda: train(replace(training, mc_groups=3), 3, folder / "groups")),
    }
    return {name: text.replace(str(folder), "") for name, text in found.items()}


def cut_short(rank: int, size: int, folder: Path) -> None:
    """Crashes in the second epoch, with a checkpoint inside it."""
    policy = Checkpointing(steps=1)
    with contextlib.suppress(Crash):
        train(TRAININGS["mc_dropout"], 3, folder, watcher=Doing(7, crash), checkpointing=policy)


def resumed(rank: int, size: int, folder: Path) -> list[str]:
    """Goes on with what another number of ranks has left."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(TRAININGS["mc_dropout"], 3, folder)
    return [str(warning.message) for warning in caught]


def commands(
    rank: int, size: int, ports: list[int], lines: list[list[str]], timeout: str
) -> list[tuple[Any, str]]:
    """Each line as `credo`, in the environment that torchrun makes: the exit code and what is said."""
    from credo import cli

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    ended = []
    for port, line in zip(ports, lines, strict=True):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = cli.main([*line, "--timeout", timeout])
        ended.append((code, said.getvalue()))
    return ended


def failing_command(
    rank: int, size: int, ports: list[int], folder: Path, what: str, epochs: int
) -> tuple[Any, str]:
    """A run of digits in which something happens to the last rank at the fifth step."""
    real = loop.Run.due

    def due(run: Any) -> bool:
        if run.work.step == 5 and rank == size - 1:
            if what == "failed":
                raise OSError("a loader failed here")
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}[what])
        return real(run)

    loop.Run.due = due  # type: ignore[method-assign]
    line = ["run", "digits", "--only", "adam", "--set", f"epochs={epochs}", "--out", str(folder)]
    (ended,) = commands(rank, size, ports, [line], "20")
    return ended
