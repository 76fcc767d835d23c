"""The one training loop: any method, any model, any data; killed at any moment, it ends as if it had not been.

Under torchrun all ranks walk through it side by side; `ranks` knows what only the first of them does.

train ── prepare: data, model, learner, schedules          functions of the recipe and the seed
      ── restore the last checkpoint, if there is one      all that changes (`state`)
      ── for each epoch: train, evaluate, log, maybe save
      ── finish: predictions, posterior, result
"""

import time
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from credo.data.augmentation import Augmentation
from credo.data.batches import Batches
from credo.data.examples import Examples
from credo.distributed import average_buffers
from credo.experiments.beliefs import Material
from credo.experiments.checkpoint import Checkpoints, load_checkpoint
from credo.experiments.checks import check_resume, check_seed, check_training
from credo.experiments.evaluation import Evaluator
from credo.experiments.examples import RunData, run_data
from credo.experiments.finish import belief, write_result
from credo.experiments.log import write_log
from credo.experiments.methods import method_of
from credo.experiments.networks import build_model
from credo.experiments.progress import Silent, Watcher
from credo.experiments.ranks import Ranks
from credo.experiments.recipe import Training
from credo.experiments.results import Result, load_result
from credo.experiments.resuming import is_finished, last_checkpoint
from credo.experiments.run_folder import RunFolder, RunName, described
from credo.experiments.saving import Checkpointing, Saver
from credo.experiments.schedules import LearningRate, learning_rate, tempering
from credo.experiments.state import RunState, private_randomness
from credo.experiments.stopping import Stop, StopRequest, stop_request
from credo.experiments.tasks import task_of

Prediction = dict[str, Tensor]


class Augmented(Protocol):
    @property
    def augmentation(self) -> Augmentation | None: ...


@dataclass(frozen=True)
class Run:
    """What the loop works with; only `state` changes."""

    training: Training
    seed: int
    folder: RunFolder
    data: RunData
    state: RunState
    rate: LearningRate
    evaluator: Evaluator
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
        (`run_folder.IDENTITY`), and else a warning: the new settings hold from there on.
    SIGTERM and Ctrl-C finish the step under way and save; then the process ends with 143, or KeyboardInterrupt.
    torch's global generator, which dropout and initialisation draw from, is forked: afterwards it is as before.
    With a process group, all ranks must call this; the folder must be one that all see, and rank 0 writes to it.
    """
    check_training(training)
    check_seed(seed)
    check_resume(resume)
    ranks, place = Ranks(), RunFolder(folder)
    ranks.refuse_differences({"seed": seed, "resume": resume, **described(training)})
    if resume is not False and ranks.once(lambda: is_finished(place, training, seed)):
        return load_result(place.path)
    ranks.once(place.make)
    with (
        ranks.held_once(place.locked()),
        stop_request() as stop,
        private_randomness(seed, torch.device(device)),
    ):
        root = None if data_root is None else Path(data_root)
        how = checkpointing or Checkpointing()
        run = prepare(training, seed, place, root, how, stop, watcher or Silent(), device, ranks)
        begin(run, resume, name or RunName())
        follow(run)
    return load_result(place.path)


def follow(run: Run) -> None:
    """From wherever the state is to the end."""
    state, prediction = run.state, None
    run.watcher.started(title(run), run.training.epochs, len(state.batches), state.step)
    try:
        while state.epoch < run.training.epochs:
            train_rest_of_epoch(run)
            prediction = evaluate_epoch(run)
            if state.epoch == run.training.epochs or run.due():
                run.saver.save()
        finish(run, prediction)
        run.due()  # finished all the same; whoever asked to stop wants the process to end, not the next run
    except Stop as stop:
        run.saver.save()
        stop.leave()
    finally:
        run.watcher.ended()


def train_rest_of_epoch(run: Run) -> None:
    """The batches that are left; none if the run was stopped between the last batch and the evaluation."""
    state = run.state
    if state.batches.epoch > state.epoch:
        return
    state.model.train()
    start = time.perf_counter()
    for inputs, targets in state.batches:
        run.rate.set(state.learner.optimizer, state.step)
        outcome = state.learner.train_batch(inputs, targets)
        if state.tempering is not None:
            state.tempering.step()
        state.running.add(outcome, len(targets))
        state.step += 1
        state.running.seconds += time.perf_counter() - start
        run.watcher.stepped(state.step)  # who watches may wait
        if run.due():
            run.saver.save()
        start = time.perf_counter()


def evaluate_epoch(run: Run) -> Prediction:
    """Scores on the test data, a line of the log, and on to the next epoch."""
    state, groups = run.state, run.state.learner.optimizer.param_groups
    average_buffers(state.model)
    state.learner.epoch_ended(state.epoch + 1)
    if state.epoch + 1 == run.training.epochs:
        state.learner.conclude(material(run))
    examples, samples = tested_with(run)
    prediction = run.evaluator.predict(state.model, state.learner.posterior(), examples, samples)
    row = {
        "epoch": state.epoch + 1,
        "lr": run.rate.at(state.step - 1),
        "tempering": groups[0].get("tempering"),
        **state.running.means(run.ranks),
        **run.evaluator.scores(prediction),
        "refused": state.learner.refused,
        "seconds": state.running.seconds,
    }
    state.log.append(row)
    state.epoch += 1
    state.running.reset()
    run.ranks.once(lambda: write_log(run.folder.log, state.log))
    run.watcher.epoch_ended(row)
    return prediction


def tested_with(run: Run) -> tuple[Examples, int | None]:
    """Test examples and samples of this epoch's evaluation: as the recipe has them, all at the end."""
    training = run.training
    if run.state.epoch + 1 == training.epochs:
        return run.data.test, None
    size = training.epoch_test_size
    return run.data.test if size is None else run.data.test.take(size), training.epoch_samples


def material(run: Run) -> Material:
    """The data as a method sees them that has something to do when training has ended."""
    data, size = run.data, run.training.batch_size

    def batches(examples: Examples) -> Batches:
        return Batches(
            examples, size, shuffle=True, seed=run.seed, normalise=data.normalise, device=run.evaluator.device
        )

    held_out = data.validation
    validation = None if held_out is None else lambda: batches(held_out)
    return Material(lambda: batches(data.train), validation, run.evaluator.task, run.seed)


def finish(run: Run, test: Prediction | None) -> None:
    """Predictions for all sets, the posterior, the model, and at the very end the result."""
    state, data, evaluator = run.state, run.data, run.evaluator
    if test is None:
        state.learner.conclude(material(run))  # a checkpoint may lie between this and the end
    model, found = state.model, state.learner.posterior()
    tested = test or evaluator.predict(model, found, data.test)  # None after a resume past the last epoch
    validation = None if data.validation is None else evaluator.predict(model, found, data.validation)
    unfamiliar = {name: evaluator.predict(model, found, part) for name, part in data.ood.items()}
    posterior = belief(run.training, state)

    def write() -> None:
        write_log(run.folder.log, state.log)
        write_result(run.folder, data, state, posterior, evaluator, tested, validation, unfamiliar)

    run.ranks.once(write)


def prepare(
    training: Training,
    seed: int,
    folder: RunFolder,
    data_root: Path | None,
    checkpointing: Checkpointing,
    stop: StopRequest,
    watcher: Watcher,
    device: str,
    ranks: Ranks,
) -> Run:
    place = torch.device(device)
    data = ranks.each(lambda: run_data(training, data_root))
    task = task_of(training.task, float(training.settings.get("noise_variance", 1.0)))
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
    saver = Saver(Checkpoints(folder.checkpoints, checkpointing.keep), state, checkpointing)
    evaluator = Evaluator(task, data.normalise, training.samples, seed, place, lambda: run.due(), ranks)
    run = Run(training, seed, folder, data, state, rate, evaluator, saver, stop, watcher, ranks)
    ranks.part_streams(place, seed)  # the model is built, and the same on all
    return run


def begin(run: Run, resume: str | bool, name: RunName) -> None:
    """Fresh, or where the last checkpoint was. The first save shows at once whether the folder can be written."""
    folder, checkpoints = run.folder, run.saver.checkpoints
    found, drift = run.ranks.once(
        lambda: last_checkpoint(folder, checkpoints, run.training, run.seed, resume)
    )
    changes: list[Any] = []
    if found is not None:
        run.state.load_state_dict(run.ranks.each(lambda: load_checkpoint(checkpoints.folder / found)))
        run.rate.set(run.state.learner.optimizer, max(run.state.step - 1, 0))  # as the last step left it
        changes = run.ranks.each(folder.read_config)["changes"]
        drift = drift + run.ranks.each(folder.other_commit)
        changes += [{"step": run.state.step, "changes": drift}] if drift else []

    def write() -> None:
        if found is None or changes:
            folder.write_config(run.training, run.seed, name, changes)
        write_log(folder.log, run.state.log)

    run.ranks.once(write)
    run.saver.save()
    run.ranks.each(
        folder.read_config
    )  # or some ranks do not see the folder, and would find out at the very end


def settings_with_augmentation(training: Training, data: Augmented) -> dict[str, Any]:
    """ρ of the augmentation reaches a method that knows what to do with it, unless the recipe says otherwise."""
    takes_it = "augmentation" in method_of(training.method).options
    rho = {"augmentation": data.augmentation.rho} if data.augmentation is not None and takes_it else {}
    return {**rho, **training.settings}


def title(run: Run) -> str:
    return f"{method_of(run.training.method).title}, seed {run.seed}"
