"""What a run folder holds already: a finished run, a checkpoint to go on from, or another run, which is an error."""

from credo.errors import InvalidValue
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.recipe import Training
from credo.experiments.run_folder import RunFolder


def is_finished(folder: RunFolder, training: Training, seed: int) -> bool:
    """Whether there is nothing left to do."""
    if folder.finished:
        folder.compare(training, seed, strictly=True)
    return folder.finished


def last_checkpoint(
    folder: RunFolder, checkpoints: Checkpoints, training: Training, seed: int, resume: str | bool
) -> tuple[str | None, list[str]]:
    """The name of the checkpoint to go on from, if any, and in which settings it differs; `resume` as in `train`."""
    if resume is False:
        folder.clear()
        checkpoints.clear()
    if resume is True and not checkpoints.complete():
        raise InvalidValue(
            f"resume=True, and {checkpoints.folder} has no checkpoint. Leave resume out to start a new run."
        )
    if not checkpoints.complete():
        return None, []
    drift = folder.compare(training, seed, strictly=False)
    newest = checkpoints.last_whole(fall_back=resume == "fallback")
    return (None if newest is None else newest.name), drift
