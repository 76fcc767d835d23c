"""Hugging Face's Trainer with a posterior: what it computes is what a plain loop computes, whatever the options."""

import os

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.errors import InvalidValue, UnsupportedOperation

pytest.importorskip("transformers", reason="extra: hf")
pytest.importorskip("accelerate", reason="extra: hf")

import transformers

from credo.integrations.transformers import (
    POSTERIOR,
    VariationalTrainer,
    VariationalTrainerMixin,
    unwrapped_optimizer,
)
from tests.integrations.tiny import bart, bert, gpt2, sequences, t5

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _streams():
    """Trainers seed the global generator."""
    with torch.random.fork_rng():
        yield


def trainer_of(model, folder, data=None, optimizer=None, samples=0, **options):
    options = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
    } | options
    options = {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 10**6, "seed": 0} | options
    data = sequences(16, model) if data is None else data
    optimizer = optimizer or credo.VOGN(model, data_size=len(data))
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    made = VariationalTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None)
    )
    made.evaluation_samples = samples
    return made


def parameters_after(model, folder, **options):
    trainer = trainer_of(model, folder, **options)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("make", [bert, gpt2, t5], ids=lambda make: make.__name__)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_are_one_batch(make, smoothing, tmp_path):
    """Of different lengths, with a last batch that is smaller: 14 examples are 8 and 6."""
    data = sequences(14, make())
    options = {"data": data, "label_smoothing_factor": smoothing, "num_train_epochs": 2, "max_grad_norm": 0.5}
    small = parameters_after(
        make(), tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=2, **options
    )
    large = parameters_after(make(), tmp_path, per_device_train_batch_size=8, **options)
    start = torch.cat([p.detach().flatten() for p in make().parameters()])
    assert (large - start).abs().max() > 1e-3
    assert (small - large).abs().max() < 1e-6


def test_a_loop_by_hand_gives_the_same(tmp_path):
    model = gpt2()
    data = sequences(16, model)
    found = parameters_after(model, tmp_path, data=data, num_train_epochs=2, lr_scheduler_type="constant")
    by_hand = gpt2()
    optimizer = credo.VOGN(by_hand, data_size=16)
    loader = trainer_of(gpt2(), tmp_path, data=data, num_train_epochs=2).get_train_dataloader()
    by_hand.train()
    for epoch in range(2):
        loader.set_epoch(epoch) if hasattr(loader, "set_epoch") else None
        for batch in loader:
            with optimizer.sampled():
                by_hand(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
            optimizer.step()
    assert (torch.cat([p.detach().flatten() for p in by_hand.parameters()]) - found).abs().max() < 1e-6


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain = parameters_after(gpt2(), tmp_path)
    model = gpt2()
    model.config.use_cache = False
    assert (parameters_after(model, tmp_path, gradient_checkpointing=True) - plain).abs().max() < 1e-6


def test_bf16_is_close(tmp_path):
    plain, rough = (parameters_after(bert().float(), tmp_path / str(b), bf16=b) for b in (False, True))
    start = torch.cat([p.detach().flatten() for p in bert().parameters()])
    assert not torch.equal(plain, rough)
    assert (rough - plain).norm() < 0.3 * (plain - start).norm()


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    options = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = parameters_after(gpt2(), tmp_path / "whole", **options)
    assert (tmp_path / "whole" / "checkpoint-2" / POSTERIOR).exists()
    model = gpt2()
    trainer = trainer_of(model, tmp_path / "whole", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), whole)
    assert unwrapped_optimizer(trainer.optimizer).counters["step"] == 4


def test_the_posterior_lies_beside_the_model(tmp_path):
    trainer = trainer_of(gpt2(), tmp_path)
    trainer.train()
    trainer.save_model()
    loaded, own = credo.load_posterior(tmp_path / POSTERIOR), trainer.posterior()
    assert all(torch.equal(loaded.mean[name], own.mean[name]) for name in own.mean)
    assert all(torch.equal(loaded.variance[name], own.variance[name]) for name in own.variance)


@pytest.mark.parametrize("make", [bert, gpt2, t5], ids=lambda make: make.__name__)
def test_evaluation_by_samples_is_that_of_predict(make, tmp_path):
    model = make()
    data = sequences(8, model)
    trainer = trainer_of(model, tmp_path, samples=3, data=data, per_device_eval_batch_size=8)
    trainer.train()
    before = [p.clone() for p in model.parameters()]
    scores = trainer.evaluate()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    generator = torch.Generator().manual_seed(0)
    draws = trainer.posterior().sample_many(generator, 3)
    total = 0
    for k in range(3):
        own = {name: tensor[k] for name, tensor in draws.items()}
        with torch.no_grad():
            arguments = {name: value for name, value in batch.items() if name != "labels"}
            total = (
                total + torch.func.functional_call(model.eval(), own, (), arguments).logits.softmax(-1) / 3
            )
    log_probs, labels = total.log(), batch["labels"]
    if make is gpt2:
        log_probs, labels = log_probs[:, :-1], labels[:, 1:]
    expected = F.nll_loss(log_probs.flatten(0, -2), labels.flatten())
    assert abs(scores["eval_loss"] - float(expected)) < 1e-5
    at_mean = trainer_of(model, tmp_path, data=data).evaluate()["eval_loss"]
    assert at_mean != scores["eval_loss"]


def test_a_failure_in_the_model_leaves_the_mean(tmp_path):
    model = gpt2()
    trainer = trainer_of(model, tmp_path, num_train_epochs=2)
    optimizer = trainer.optimizer
    seen = []

    def fail(module, inputs, outputs):
        seen.append([p.detach().clone() for p in model.parameters()])
        if len(seen) == 4:
            raise KeyboardInterrupt

    handle = model.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    means = optimizer.posterior().mean
    assert any(not torch.equal(a, b) for a, b in zip(seen[-1], model.parameters(), strict=True))
    assert all(torch.equal(p, means[name]) for name, p in model.named_parameters())
    assert optimizer.counters["step"] == 3


def test_an_optimiser_by_class_and_options(tmp_path):
    model = bert()
    data = sequences(16, model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = VariationalTrainer(
        model=model, args=arguments, train_dataset=data, optimizer_cls_and_kwargs=(credo.IVON, {"seed": 3})
    )
    made = trainer.create_optimizer()
    assert type(made) is credo.IVON
    assert made.settings["data_size"] == 16
    assert made.settings["seed"] == 3


def test_what_cannot_be_done_is_named(tmp_path):
    model = bert()
    with pytest.raises(UnsupportedOperation, match=r"mc_samples must be 1.*gradient_accumulation_steps"):
        trainer_of(model, tmp_path, optimizer=credo.VOGN(model, data_size=16, mc_samples=2)).train()
    with pytest.raises(InvalidValue, match="AdamW without a posterior"):
        trainer_of(model, tmp_path, optimizer=torch.optim.AdamW(model.parameters())).train()


def test_a_posterior_over_adapters_alone(tmp_path):
    peft = pytest.importorskip("peft", reason="extra: hf")
    base = gpt2()
    frozen = {name: p.clone() for name, p in base.named_parameters()}
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    data = sequences(16, base)
    trainer = trainer_of(
        model, tmp_path, data=data, optimizer=credo.VOGN(model, data_size=16), num_train_epochs=2
    )
    trainer.train()
    trainer.save_model()
    posterior = credo.load_posterior(tmp_path / POSTERIOR)
    assert posterior.mean
    assert all("lora_" in name for name in posterior.mean)
    assert not posterior.buffers
    assert all(torch.equal(p, frozen[n]) for n, p in base.named_parameters() if n in frozen)
    adapter = os.path.getsize(tmp_path / "adapter_model.safetensors")
    assert os.path.getsize(tmp_path / POSTERIOR) < 2 * adapter
    own = trainer.posterior()
    assert all(torch.equal(posterior.mean[name], own.mean[name]) for name in own.mean)
    for name, variance in own.variance.items():
        torch.testing.assert_close(posterior.variance[name], variance, rtol=2**-8, atol=0)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(t.numel() for t in posterior.tensors().values()) == 2 * numbers
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    prediction = credo.predict(model, posterior, loader, samples=4)
    assert prediction.probs.shape == (16, 8, 30)
    assert float(prediction.mutual_information.mean()) > 0


class Seq2SeqTrainer(VariationalTrainerMixin, transformers.Seq2SeqTrainer):
    """As its users write it."""


@pytest.mark.parametrize("make", [t5, bart], ids=lambda make: make.__name__)
def test_from_sequence_to_sequence(make, tmp_path):
    """The Trainer for it, by class; micro-batches, resuming, generation, evaluation by samples, and predict."""
    data = [{n: t for n, t in row.items() if n != "decoder_input_ids"} for row in sequences(14, make())]
    joined = {name: torch.stack([row[name] for row in data]) for name in data[0]}

    def run(folder, resume=None, **options):
        model = make()
        options = {"num_train_epochs": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True} | options
        options = {"predict_with_generate": True, "per_device_eval_batch_size": 14} | options
        options = {"save_strategy": "no"} | options
        arguments = transformers.Seq2SeqTrainingArguments(str(folder), seed=0, **options)
        trainer = Seq2SeqTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            optimizer_cls_and_kwargs=(credo.VOGN, {}),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])

    saving = {"per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}
    trainer, whole = run(tmp_path, **saving)
    _, parts = run(tmp_path / "parts", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert (parts - whole).abs().max() < 1e-6
    assert unwrapped_optimizer(trainer.optimizer).settings["data_size"] == 14
    _, resumed = run(tmp_path, str(tmp_path / "checkpoint-2"), **saving)
    assert torch.equal(resumed, whole)
    trainer.evaluation_samples = 3
    found = trainer.predict(data)
    assert found.predictions.ndim == 2  # words that were generated
    assert found.predictions.dtype.kind == "i"
    trainer.args.predict_with_generate = False
    prediction = credo.predict(
        trainer.model, trainer.posterior(), [joined], samples=3, seed=trainer.args.seed
    )
    log_probs, labels = prediction.log_probs.flatten(0, 1), joined["labels"].flatten()
    assert abs(found.metrics["test_loss"] - float(F.nll_loss(log_probs, labels))) < 1e-5
    assert abs(trainer.evaluate()["eval_loss"] - found.metrics["test_loss"]) < 1e-9
    explicit = {"decoder_input_ids": trainer.model.prepare_decoder_input_ids_from_labels(joined["labels"])}
    again = credo.predict(trainer.model, trainer.posterior(), [{**joined, **explicit}], samples=3, seed=0)
    assert torch.equal(again.probs, prediction.probs)
