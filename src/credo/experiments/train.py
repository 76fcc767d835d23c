"""The one training loop: any method, any model, any data; killed at any moment, it ends as if it had not been.

Under torchrun all ranks walk through it side by side; `ranks` knows what only the first of them does.

train ── prepare: data, model, learner, schedules          functions of the recipe and the seed
      ── restore the last checkpoint, if there is one      all that changes (`state`)
      ── follow: step after step, and maybe save           of a single task, below, or of a stream of tasks (`streams`)
      ── finish: predictions, posterior, result
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, final

import torch

from credo.data.augmentation import Augmentation
from credo.data.batches import Batches
from credo.data.examples import Examples
from credo.distributed import average_buffers
from credo.experiments.build import LearningRate, RunData, build_model, learning_rate, run_data, tempering
from credo.experiments.checkpoint import (
    Checkpointing,
    Checkpoints,
    Saver,
    is_finished,
    last_checkpoint,
    load_checkpoint,
)
from credo.experiments.learners import Material
from credo.experiments.methods import method_of
from credo.experiments.overrides import check_resume, check_seed, check_training
from credo.experiments.ranks import Ranks
from credo.experiments.recipe import Training
from credo.experiments.results import Result, final_posterior, load_result, write_result
from credo.experiments.run_folder import RunFolder, RunName, described, write_log
from credo.experiments.state import RunState, Work, private_randomness
from credo.experiments.stopping import Stop, StopRequest, stop_request
from credo.experiments.streams import stream_of
from credo.experiments.tasks import Evaluator, Predicted, task_of
from credo.experiments.watchers import Watcher


class Augmented(Protocol):
    @property
    def augmentation(self) -> Augmentation | None: ...


@dataclass(frozen=True)
class Run:
    """What the loop works with; only `work` changes."""

    work: Work
    saver: Saver
    stop: StopRequest
    watcher: Watcher
    ranks: Ranks

    def due(self) -> bool:
        """Whether it is time for a checkpoint; raises Stop if any rank was asked to. All ranks decide alike."""
        signal, due = self.ranks.largest(self.stop.signal or 0, self.saver.is_due())
        if signal:
            raise Stop(signal)
        return bool(due)


def train(
    training: Training,
    seed: int,
    folder: str | PathLike[str],
    *,
    resume: str | bool = "auto",
    data_root: str | PathLike[str] | None = None,
    watcher: Watcher | None = None,
    name: RunName | None = None,
    checkpointing: Checkpointing | None = None,
    device: str = "cpu",
) -> Result:
    """Train, evaluate and keep everything in `folder`; the same training and seed give the same bits.

    resume: "auto" goes on from the last checkpoint if there is one; "fallback" does too, and takes the one before a
        damaged one; True is an error without a checkpoint; False starts afresh and removes what was there.
        A finished run is returned as it is. A run of other settings is an error if they are part of its identity
        (`run_folder.IDENTITY`; all of a stream of tasks), and else a warning: the new settings hold from there on.
    device: of a single task; streams of tasks are learned on the CPU.
    SIGTERM and Ctrl-C finish the step under way and save; then the process ends with 143, or KeyboardInterrupt.
    torch's global generator, which dropout and initialisation draw from, is forked: afterwards it is as before.
    With a process group, all ranks must call this; the folder must be one that all see, and rank 0 writes to it.
    """
    check_training(training)
    check_seed(seed)
    check_resume(resume)
    ranks, place = Ranks(), RunFolder(folder)
    ranks.check_agreement({"seed": seed, "resume": resume, **described(training)})
    if resume is not False and ranks.once(lambda: is_finished(place, training, seed, name)):
        return load_result(place.path)
    ranks.once(place.make)
    with (
        ranks.held_once(place.locked()),
        stop_request() as stop,
        private_randomness(seed, torch.device(device)),
    ):
        root = None if data_root is None else Path(data_root)
        work: Work
        if training.tasks is None:
            work = single_task(
                training, seed, place, name or RunName(), root, lambda: run.due(), device, ranks
            )
        else:
            work = stream_of(training, seed, place, name or RunName(), root, ranks)
        policy = checkpointing or Checkpointing()
        saver = Saver(Checkpoints(place.checkpoints, policy.keep), work, policy)
        run = Run(work, saver, stop, watcher or Watcher(), ranks)
        begin(run, place, training, seed, resume)
        follow(run)
    return load_result(place.path)


def begin(run: Run, folder: RunFolder, training: Training, seed: int, resume: str | bool) -> None:
    """Fresh, or where the last checkpoint was. The first save shows at once whether the folder can be written."""
    checkpoints = run.saver.checkpoints
    found, drift = run.ranks.once(lambda: last_checkpoint(folder, checkpoints, training, seed, resume))
    if found is not None:
        run.work.load_state_dict(run.ranks.each(lambda: load_checkpoint(checkpoints.folder / found)))
    run.work.begin(found is not None, drift)
    run.saver.save()
    # Or some ranks do not see the folder, and would find out at the very end
    run.ranks.each(run.work.confirm)


def follow(run: Run) -> None:
    """From wherever the state is to the end."""
    work = run.work
    finished = False
    run.watcher.started(work.title, work.epochs, work.steps_per_epoch, work.step)
    try:
        for must_save in work.steps(run.watcher):
            if must_save or run.due():
                run.saver.save()
        work.finish()
        finished = True
        run.due()  # finished all the same; whoever asked to stop wants the process to end, not the next run
    except Stop as stop:
        if not finished:
            run.saver.save()
        stop.leave()
    finally:
        run.watcher.ended()


# A single task


@final
class SingleTask(Work):
    """Epochs over one training set, each followed by an evaluation; only `state` changes."""

    def __init__(
        self,
        training: Training,
        seed: int,
        folder: RunFolder,
        name: RunName,
        data: RunData,
        state: RunState,
        rate: LearningRate,
        evaluator: Evaluator,
    ) -> None:
        self.training, self.seed, self.folder, self.name = training, seed, folder, name
        self.data, self.state, self.rate, self.evaluator = data, state, rate, evaluator
        self.title = f"{method_of(training.method).title}, seed {seed}"
        self.epochs, self.steps_per_epoch, self.ranks = training.epochs, len(state.batches), state.ranks
        self._prediction: Predicted | None = None  # of the last evaluation

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def step(self) -> int:
        return self.state.step

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state.load_state_dict(saved)
        self.rate.set(self.state.learner.optimizer, max(self.state.step - 1, 0))  # as the last step left it

    def begin(self, resumed: bool, drift: list[str]) -> None:
        changes: list[Any] = []
        if resumed:
            changes = self.ranks.each(self.folder.read_config)["changes"]
            drift = drift + self.ranks.each(self.folder.other_commit)
            changes += [{"step": self.state.step, "changes": drift}] if drift else []

        def write() -> None:
            if not resumed or changes:
                self.folder.write_config(self.training, self.seed, self.name, changes)
            write_log(self.folder.log, self.state.log)

        self.ranks.once(write)

    def confirm(self) -> None:
        self.folder.read_config()

    def steps(self, watcher: Watcher) -> Iterator[bool]:
        while self.state.epoch < self.epochs:
            yield from self._train_rest_of_epoch(watcher)
            self._evaluate_epoch(watcher)
            yield self.state.epoch == self.epochs

    def _train_rest_of_epoch(self, watcher: Watcher) -> Iterator[bool]:
        """The batches that are left; none if the run was stopped between the last batch and the evaluation."""
        state = self.state
        if state.batches.epoch > state.epoch:
            return
        state.model.train()
        start = time.perf_counter()
        for inputs, targets in state.batches:
            self.rate.set(state.learner.optimizer, state.step)
            outcome = state.learner.train_batch(inputs, targets)
            if state.tempering is not None:
                state.tempering.step()
            state.running.add(outcome, len(targets))
            state.step += 1
            state.running.seconds += time.perf_counter() - start
            watcher.stepped(state.step)  # who watches may wait
            yield False
            start = time.perf_counter()

    def _evaluate_epoch(self, watcher: Watcher) -> None:
        """Scores on the test data, a line of the log, and on to the next epoch."""
        state, groups = self.state, self.state.learner.optimizer.param_groups
        average_buffers(state.model)
        state.learner.epoch_ended(state.epoch + 1)
        if state.epoch + 1 == self.epochs:
            state.learner.conclude(self._material())
        examples, samples = self._tested_with()
        prediction = self.evaluator.predict(state.model, state.learner.posterior(), examples, samples)
        row = {
            "epoch": state.epoch + 1,
            "lr": self.rate.at(state.step - 1),
            "tempering": groups[0].get("tempering"),
            **state.running.means(self.ranks),
            **self.evaluator.scores(prediction),
            "refused": state.learner.refused,
            "seconds": state.running.seconds,
        }
        state.log.append(row)
        state.epoch += 1
        state.running.reset()
        self.ranks.once(lambda: write_log(self.folder.log, state.log))
        watcher.epoch_ended(row)
        self._prediction = prediction

    def _tested_with(self) -> tuple[Examples, int | None]:
        """Test examples and samples of this epoch's evaluation: as the recipe has them, all at the end."""
        if self.state.epoch + 1 == self.epochs:
            return self.data.test, None
        size = self.training.epoch_test_size
        return self.data.test if size is None else self.data.test.take(size), self.training.epoch_samples

    def _material(self) -> Material:
        """The data as a method sees them that has something to do when training has ended."""
        data, size = self.data, self.training.batch_size

        def batches(examples: Examples) -> Batches:
            return Batches(
                examples,
                size,
                shuffle=True,
                seed=self.seed,
                normalise=data.normalise,
                device=self.evaluator.device,
            )

        held_out = data.validation
        validation = None if held_out is None else lambda: batches(held_out)
        return Material(lambda: batches(data.train), validation, self.evaluator.task, self.seed)

    def finish(self) -> None:
        """Predictions for all sets, the posterior, the model, and at the very end the result."""
        state, data, evaluator = self.state, self.data, self.evaluator
        if self._prediction is None:  # after a resume past the last epoch
            state.learner.conclude(self._material())
        model, found = state.model, state.learner.posterior()
        tested = self._prediction or evaluator.predict(model, found, data.test)
        validation = None if data.validation is None else evaluator.predict(model, found, data.validation)
        unfamiliar = {name: evaluator.predict(model, found, part) for name, part in data.ood.items()}
        posterior = final_posterior(self.training, state)

        def write() -> None:
            write_log(self.folder.log, state.log)
            write_result(self.folder, data, state, posterior, evaluator, tested, validation, unfamiliar)

        self.ranks.once(write)


def single_task(
    training: Training,
    seed: int,
    folder: RunFolder,
    name: RunName,
    data_root: Path | None,
    between: Callable[[], object],
    device: str,
    ranks: Ranks,
) -> SingleTask:
    """`between` is called between the parts of an evaluation, and may raise to stop."""
    place = torch.device(device)
    data = ranks.each(lambda: run_data(training, data_root))
    task = task_of(training)
    model = build_model(training, data.shape, data.outputs).to(place)
    learner = method_of(training.method).build(
        model, task, data_size=len(data.train), seed=seed, settings=settings_with_augmentation(training, data)
    )
    share, shares = ranks.data_share(training.mc_groups)
    ranks.warn_of_unequal_shares(training.batch_size, shares)
    batches = Batches(
        data.train,
        training.batch_size,
        shuffle=True,
        seed=seed,
        augmentation=data.augmentation,
        normalise=data.normalise,
        device=place,
        rank=share,
        world=shares,
    )
    rate = learning_rate(training, learner.optimizer, len(batches))
    temper = tempering(training, learner.optimizer, len(batches))
    state = RunState(model, learner, temper, batches, place, ranks)
    evaluator = Evaluator(task, data.normalise, training.samples, seed, place, between, ranks)
    ranks.part_streams(place, seed)  # the model is built, and the same on all
    return SingleTask(training, seed, folder, name, data, state, rate, evaluator)


def settings_with_augmentation(training: Training, data: Augmented) -> dict[str, Any]:
    """ρ of the augmentation reaches a method that knows what to do with it, unless the recipe says otherwise."""
    takes_it = "augmentation" in method_of(training.method).options
    rho = {"augmentation": data.augmentation.rho} if data.augmentation is not None and takes_it else {}
    return {**rho, **training.settings}
