"""Lightning with a posterior (extra `lightning`): accumulation, and a callback that logs, evaluates and saves.

    trainer = lightning.Trainer(accumulate_grad_batches=4, callbacks=[PosteriorCallback(validation=(x, y))])

Without the callback a module that returns credo.VOGN from `configure_optimizers` trains as well, but for
`accumulate_grad_batches` and for blocks in manual optimisation (`optimizer.step(closure)` needs none). With it:

    optimizer = self.optimizers()
    with optimizer.sampled():
        self.manual_backward(loss)
    optimizer.step()
"""

import math
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

try:
    import lightning
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise ImportError(
        "credo.integrations.lightning needs Lightning: pip install 'credo[lightning]'"
    ) from error

from credo.errors import InvalidValue
from credo.integrations.updates import UpdateBlock
from credo.metrics import evaluate
from credo.optim import BayesianOptimizer
from credo.optim.scales import DiagonalOptimizer
from credo.posterior import Posterior
from credo.predict import predict
from credo.predict.outputs import Task


@final
class PosteriorCallback(lightning.Callback):
    """For trainers whose module returns one credo optimiser.

    validation: (inputs, targets), read at the end of each epoch; None: no scores.
    samples, task, noise: as for `credo.predict`.
    save: where the posterior is written at the end of each epoch; a relative path is inside the trainer's root folder.

    It logs `posterior/nll`, `posterior/ece` and what else `credo.evaluate` has for the task; `posterior/elbo`, the
    lower bound estimated from the losses of the epoch, which were taken at samples; and of each parameter group the
    curvature's share of the precision, the noise and the signal. `trainer.callback_metrics` has them all.
    """

    def __init__(
        self,
        validation: tuple[Any, Any] | None = None,
        *,
        samples: int = 10,
        task: Task = "classification",
        noise: float | None = None,
        save: str | PathLike[str] | None = None,
    ):
        self._validation, self._samples, self._task, self._noise, self._save = (
            validation,
            samples,
            task,
            noise,
            save,
        )
        self._block = UpdateBlock()
        self._steps: dict[int, Any] = {}
        self._first, self._size = (
            0,
            1.0,
        )  # examples of an update's first micro-batch; this one's size beside it
        self._total, self._batches = 0.0, 0

    # Accumulation

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning runs all micro-batches but the last without a word to the optimiser, and hands it the last one."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, BayesianOptimizer):
                self._steps[id(optimizer)] = vars(optimizer).get("step")  # a scheduler's, or none of its own
                optimizer.step = _Step(self._block, optimizer)  # type: ignore[method-assign]
        if trainer.accumulate_grad_batches > 1:
            plugin = trainer.strategy.precision_plugin
            before = plugin.pre_backward

            def weighed(loss: Tensor, module: Any) -> Tensor:
                loss = before(loss, module)
                return loss * self._size if self._block and self._size != 1 else loss

            plugin.pre_backward = weighed

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The optimiser's own step again."""
        vars(trainer.strategy.precision_plugin).pop("pre_backward", None)
        for optimizer in trainer.optimizers:
            if id(optimizer) in self._steps:
                del optimizer.step
                if (before := self._steps.pop(id(optimizer))) is not None:
                    optimizer.step = before

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens the block of an update of several micro-batches."""
        if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
            size = _examples(batch)
            if not self._block:
                self._first = size
            self._block.begin(optimizer_of(trainer))
            self._size = size / self._first if size and self._first else 1.0
            self._block.add(self._size / trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Closes it after the last one, before Lightning clips."""
        if self._block.last:
            self._block.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The weights are the mean again."""
        self._block.abandon(exception)
        self.on_fit_end(trainer, pl_module)

    # Numbers

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds up the losses, which Lightning has divided by the number of micro-batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._total += float(loss) * trainer.accumulate_grad_batches
            self._batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs, and saves."""
        optimizer = optimizer_of(trainer)
        posterior = optimizer.posterior()
        found = {**self._bound(optimizer, posterior), **_diagnostics(optimizer)}
        if self._validation is not None:
            found |= self._scores(pl_module, posterior)
        self._total, self._batches = 0.0, 0
        pl_module.log_dict({f"posterior/{name}": float(value) for name, value in found.items()})
        if self._save is not None and trainer.is_global_zero:
            posterior.save(Path(trainer.default_root_dir) / self._save)

    def _bound(self, optimizer: BayesianOptimizer, posterior: Posterior) -> dict[str, float]:
        """What the optimiser maximises, −N·(mean loss) − Σ τ·KL(q‖p) over the tensors, each with its own prior."""
        if not self._batches or not isinstance(optimizer, DiagonalOptimizer):
            return {}
        kl = tempered = 0.0
        for own in optimizer.beliefs():
            if own.deterministic:
                continue
            if math.isnan(own.numbers.prior_precision):  # a posterior is the prior
                return {}
            mean, variance = posterior.mean[own.name], posterior.variance[own.name]
            own_kl = float(_kl(mean, variance, own.numbers.prior_precision))
            kl, tempered = kl + own_kl, tempered + own.tempering * own_kl
        return {"elbo": -optimizer.data_size * self._total / self._batches - tempered, "kl": kl}

    def _scores(self, module: Any, posterior: Posterior) -> dict[str, float]:
        assert self._validation is not None
        inputs, targets = self._validation
        options: dict[str, Any] = {"samples": self._samples, "task": self._task, "noise": self._noise}
        with torch.no_grad():
            return dict(evaluate(predict(module, posterior, inputs, **options), targets))


class _Step:
    """`step` of an optimiser whose samples may have been taken before Lightning hands over a closure.

    It is then the last micro-batch of an open block, or in manual optimisation one that does nothing.
    """

    def __init__(self, block: UpdateBlock, optimizer: BayesianOptimizer):
        self._block, self._optimizer, self._step = block, optimizer, optimizer.step

    def __call__(self, closure: Any = None, **options: Any) -> Any:
        if closure is None or not (self._block or self._optimizer._gathered.samples):
            return self._step(closure, **options)
        self._block.last = bool(self._block)
        try:
            loss = closure()  # with Lightning's hooks and clipping
        except BaseException as error:
            self._block.abandon(error)
            raise
        self._block.end()
        self._step(**options)
        return loss


def _examples(batch: Any) -> int:
    """Of a micro-batch, by which it counts; 0 where Lightning cannot tell, and all count alike."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that differ
            return int(extract_batch_size(batch))
    except (RuntimeError, MisconfigurationException):
        return 0


def optimizer_of(trainer: Any) -> BayesianOptimizer:
    """The only one with a posterior."""
    found = [own for own in trainer.optimizers if isinstance(own, BayesianOptimizer)]
    if len(found) != 1:
        raise InvalidValue(
            f"PosteriorCallback needs one credo optimiser, and configure_optimizers returned {len(found)}. Return "
            "credo.VOGN(self, data_size=len(data))"
        )
    return found[0]


def _diagnostics(optimizer: BayesianOptimizer) -> dict[str, float]:
    found = {}
    for k, group in enumerate(optimizer.diagnostics()):
        for name in ("curvature_share", "signal_to_noise", "noise", "step_size", "tempering"):
            found[f"group{k}/{name}"] = float(getattr(group, name))
    return found


def _kl(mean: Tensor, variance: Tensor, precision: float) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1/δ))."""
    ratio = variance * precision
    kl: Tensor = 0.5 * (ratio + precision * mean.square() - 1 - ratio.log()).sum()
    return kl
