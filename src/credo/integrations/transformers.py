"""Hugging Face's Trainer with a posterior (extra `hf`).

    class Trainer(VariationalTrainerMixin, transformers.Trainer): ...       # or VariationalTrainer, which is that

    trainer = VariationalTrainer(model=model, args=arguments, train_dataset=data,
        optimizers=(credo.VOGN(model, data_size=len(data)), None))          # None: Trainer makes its own scheduler
    trainer.train()
    posterior = trainer.posterior()

The Trainer calls forward and backward once for each micro-batch, and then `step()`. The mixin opens one sampling block
at the first micro-batch of an update and closes it after the last: all of them are at the same weight sample. Each loss
counts by its share of the update's items (labels that are not ignored), so that an update of n micro-batches is that of
one batch with the examples of all. One example is one sequence.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "credo.integrations.transformers needs Hugging Face: pip install 'credo[hf]'"
    ) from error

from credo.errors import CallOrderError, UnsupportedOperation
from credo.integrations.updates import UpdateBlock, draws, loaded, unwrapped_optimizer
from credo.optim import BayesianOptimizer
from credo.posterior import DiagonalPosterior, Posterior
from credo.predict.prediction import wide

POSTERIOR = "posterior.safetensors"  # its file in a checkpoint's folder
IGNORED = -100  # labels that do not count
CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


@final
class MeanLabelSmoother:
    """transformers' LabelSmoother as one mean over the labels that count, which the engine can undo."""

    def __init__(self, epsilon: float):
        self.epsilon = epsilon

    def __call__(
        self, outputs: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        rows, flat = wide(logits).flatten(0, -2), labels.flatten()
        loss = F.cross_entropy(rows, flat, ignore_index=IGNORED, label_smoothing=self.epsilon)
        share = (
            1.0 if num_items_in_batch is None else int((flat != IGNORED).sum()) / float(num_items_in_batch)
        )
        return loss * share


class VariationalTrainerMixin:
    """Before `transformers.Trainer` (or a subclass of it) among the bases.

    Its options are attributes:

    evaluation_samples: 0, the default, evaluates the mean. A number averages the probabilities of so many samples of
        the posterior; the loss is then minus the logarithm of the averaged probability.
    compact_posterior: whether the file of an adapter's posterior is compact, which rounds variances by at most 0.4 %;
        it is then 1.5 times as large as the adapter. Other files are exact.
    """

    evaluation_samples: int = 0
    compact_posterior: bool = True
    _block: UpdateBlock
    _items = 0  # of the update under way
    _draws: list[dict[str, Tensor]] | None = None  # weights of the evaluation under way

    def __init__(self, *args: Any, **kwargs: Any):
        self._block = UpdateBlock()
        above: Any = super()
        kind, _ = kwargs.get("optimizer_cls_and_kwargs") or (None, {})
        by_class = isinstance(kind, type) and issubclass(kind, BayesianOptimizer)
        chosen = (
            kwargs.pop("optimizer_cls_and_kwargs") if by_class else None
        )  # Seq2SeqTrainer does not take it
        above.__init__(*args, **kwargs)
        own: Any = self
        if by_class:
            own.optimizer_cls_and_kwargs = chosen
        own.loss_is_scaled_for_ga = True  # by `compute_loss`, and not once more
        if own.label_smoother is not None:
            own.label_smoother = MeanLabelSmoother(own.args.label_smoothing_factor)

    # The posterior

    def posterior(self) -> Posterior:
        """What is believed now. Of an adapter it has the adapter's weights alone."""
        own: Any = self
        found = unwrapped_optimizer(own.optimizer).posterior()
        return found.with_buffers({}) if self._is_adapter() else found

    def _is_adapter(self) -> bool:
        own: Any = self
        return any(not p.requires_grad for p in own.model.parameters())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers', with the posterior beside the model; checkpoints have it too."""
        own: Any = super()
        own.save_model(output_dir, _internal_call)
        trainer: Any = self
        if trainer.optimizer is None or not trainer.args.should_save:
            return
        if unwrapped_optimizer(trainer.optimizer).counters["step"]:
            path, found = Path(output_dir or trainer.args.output_dir) / POSTERIOR, self.posterior()
            diagonal = isinstance(found, DiagonalPosterior)
            found.save(path, compact=self.compact_posterior and diagonal and self._is_adapter())

    def create_optimizer(self, model: Any = None) -> Any:
        """For optimizer_cls_and_kwargs=(credo.VOGN, {...}): from the module, with data_size from the data.

        transformers would make groups with a weight decay. The prior does its work here.
        """
        own: Any = self
        kind, options = getattr(own, "optimizer_cls_and_kwargs", None) or (None, {})
        if own.optimizer is None and isinstance(kind, type) and issubclass(kind, BayesianOptimizer):
            if "data_size" not in options and own.train_dataset is not None:
                options = {**options, "data_size": len(own.train_dataset)}
            own.optimizer = kind(own.model if model is None else model, **options)
            return own.optimizer
        above: Any = super()
        return above.create_optimizer(model)

    # Training

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """transformers', which reads the micro-batches of an update before the first of them is run."""
        above: Any = super()
        batches, items = above.get_batch_samples(epoch_iterator, num_batches, device)
        self._items = sum(map(self._items_of, batches))
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One micro-batch, inside the sampling block of its update."""
        own: Any = self
        above: Any = super()
        optimizer = unwrapped_optimizer(own.optimizer)
        with self._block.part(optimizer, last=own.accelerator.sync_gradients):
            loss: Tensor = above.training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """transformers', as a mean over the micro-batch times its share of the update.

        transformers divides sums by a number of items. The engine reads means, and undoes them.
        """
        above: Any = super()
        if not self._block:
            return above.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        share = self._share(inputs)
        found = above.compute_loss(model, inputs, return_outputs, None)
        return (found[0] * share, found[1]) if return_outputs else found * share

    def _share(self, inputs: Mapping[str, Any]) -> float:
        """What makes the mean over a micro-batch its part of the mean over the update."""
        mine = self._items_of(inputs)
        if not mine:
            raise CallOrderError("all labels of a micro-batch are ignored (-100): it has no loss.")
        return mine / self._items if self._items else 1.0

    def _items_of(self, inputs: Mapping[str, Any]) -> int:
        """What the loss is a mean over: labels that are not ignored, or examples."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
            return next((len(t) for t in inputs.values() if isinstance(t, Tensor) and t.dim()), 1)
        return int((labels[..., 1:] if self._shifts_labels() else labels).ne(IGNORED).sum())

    def _shifts_labels(self) -> bool:
        """Whether the model is asked for the next label; transformers' own attribute does not know GPT-2."""
        own: Any = self
        inner = own.accelerator.unwrap_model(own.model)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        return bool(own._loss_shifts_labels) or type(inner).__name__ in CAUSAL

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """transformers', at the mean or, with `evaluation_samples`, at samples of the posterior."""
        above: Any = super()
        if self.evaluation_samples < 1:
            return above.evaluation_loop(*args, **kwargs)
        own: Any = self
        self._draws = draws(own.model, self.posterior(), self.evaluation_samples, own.args.seed)
        try:
            return above.evaluation_loop(*args, **kwargs)
        finally:
            self._draws = None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """transformers'; of samples, the logits are the logarithm of the averaged probabilities.

        Where a Seq2SeqTrainer generates (`predict_with_generate`), it does so with the mean; the loss is of samples.
        """
        above: Any = super()
        if self._draws is None:
            return above.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        own: Any = self
        generates = bool(getattr(own.args, "predict_with_generate", False))
        step: Any = partial(transformers.Trainer.prediction_step, own) if generates else above.prediction_step
        total: Tensor | None = None
        labels = None
        for sample in self._draws:
            with loaded(own.model, sample):
                _, logits, labels = step(model, dict(inputs), False, ignore_keys)
            if isinstance(logits, tuple | list):
                logits = logits[0]
            assert isinstance(logits, Tensor)
            log_probs = wide(logits).log_softmax(-1)
            total = log_probs if total is None else torch.logaddexp(total, log_probs)
        assert total is not None
        averaged = total - math.log(len(self._draws))
        loss = None if labels is None else self._loss_of(averaged, labels)
        if prediction_loss_only:
            return loss, None, None
        if generates:
            return loss, *above.prediction_step(model, inputs, False, ignore_keys)[1:]
        return loss, averaged, labels

    def _loss_of(self, log_probs: Tensor, labels: Any) -> Tensor:
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise UnsupportedOperation(
                "evaluation by samples averages probabilities of classes, and these labels are none. Evaluate the "
                "mean: evaluation_samples = 0"
            )
        if self._shifts_labels():
            log_probs, labels = log_probs[:, :-1], labels[:, 1:]
        return F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


@final
class VariationalTrainer(VariationalTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with the mixin."""
