"""LoRA adapters of small language models trained here: AdamW, also with a temperature, VOGN, IVON, BBB, Laplace.

    python -m benchmarks.lora --out benchmarks/lora.jsonl                       # runs what is missing, all tasks
    python -m benchmarks.lora --out benchmarks/lora.jsonl --tasks causal --seeds 1
    python -m benchmarks.lora --out benchmarks/lora.jsonl --show                # the table

Sequences come from Markov chains. A model is trained from scratch on first chains; adapters (rank 8, all linear layers)
then learn new chains from 64 sequences, in 20 epochs of Hugging Face's Trainer, with its linear schedule.

    causal     GPT-2: the next word
    classify   BERT: which of three chains a sequence comes from
    seq2seq    T5: a sequence of the chain that the first word of the source names

Each method has the best of three steps by the NLL of 100 validation sequences, AdamW of learning rates, the others of
multiples of their default. The same sequences fit the temperature, the width of Laplace (diagonal, around AdamW's
weights), and that of the posteriors in the rows "calibrated". Scores are of 300 test sequences, each label alike;
posteriors are averaged over 20 samples.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import Tensor, nn

import credo
from credo.integrations.transformers import VariationalTrainer

WORDS, LENGTH, NEW, VALIDATION, TEST = 16, 12, 64, 100, 300
EPOCHS, BATCH, SAMPLES = 20, 16, 20
RATES, STEPS = (1e-3, 3e-3, 1e-2), (1.0, 3.0, 10.0)
IGNORED = -100
METHODS = {"VOGN": credo.VOGN, "IVON": credo.IVON, "BBB": credo.BayesByBackprop}
Rows = list[dict[str, Tensor]]


class Task(NamedTuple):
    kind: str  # of peft
    layers: list[str]
    pretrained: int  # sequences


TASKS = {
    "causal": Task("CAUSAL_LM", ["c_attn", "c_proj", "c_fc"], 3000),
    "classify": Task("SEQ_CLS", ["query", "key", "value", "dense"], 3000),
    "seq2seq": Task("SEQ_2_SEQ_LM", ["q", "k", "v", "o", "wi", "wo"], 3000),
}


def chain(seed: int) -> Tensor:
    """Probabilities of the next word, (WORDS, WORDS); words 0 to 2 are names of chains, and are never said."""
    logits = 2 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))
    logits[:, :3] = -torch.inf
    return logits.softmax(-1)


def rows(task: str, chains: tuple[int, int, int], n: int, seed: int) -> Rows:
    """Sequences of three chains in turn; a causal model has the first alone."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.stack([chain(k) for k in chains])
    which = torch.arange(n) % 3 if task != "causal" else torch.zeros(n, dtype=torch.long)
    ids = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
    for t in range(1, LENGTH):
        ids[:, t] = torch.multinomial(tables[which, ids[:, t - 1]], 1, generator=generator)[:, 0]
    if task == "causal":
        return [{"input_ids": row, "labels": row} for row in ids]
    if task == "classify":
        return [{"input_ids": row, "labels": label} for row, label in zip(ids, which, strict=True)]
    shifted = torch.cat([torch.zeros(n, 1, dtype=torch.long), ids[:, :-1]], 1)
    source = torch.stack([which, ids[:, 0]], 1)
    columns = zip(source, shifted, ids, strict=True)
    return [{"input_ids": s, "decoder_input_ids": d, "labels": y} for s, d, y in columns]


def network(task: str) -> Any:
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if task == "causal":
        sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**words, **sizes))
    if task == "classify":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.BertConfig(
            **words, **sizes, num_labels=3, max_position_embeddings=LENGTH, type_vocab_size=1
        )
        return transformers.BertForSequenceClassification(config)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**words, **sizes, decoder_start_token_id=0, tie_word_embeddings=False)
    return transformers.T5ForConditionalGeneration(config)


def pretrained(task: str, seed: int) -> dict[str, Tensor]:
    """Weights after some epochs on the first chains."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        model, data = network(task), rows(task, (0, 1, 2), TASKS[task].pretrained, seed)
        trained(model, data, torch.optim.AdamW(model.parameters(), lr=3e-3), epochs=4, batch=32, seed=seed)
    return model.state_dict()


def adapted(task: str, weights: dict[str, Tensor], seed: int) -> Any:
    """The pretrained model with new adapters; a classifier's last layer is trained with them."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        base = network(task)
        base.load_state_dict(weights)
        kind, layers, _ = TASKS[task]
        config = peft.LoraConfig(r=8, target_modules=layers, fan_in_fan_out=task == "causal", task_type=kind)
        return peft.get_peft_model(base, config)


def trained(model: nn.Module, data: Rows, optimizer: Any, epochs: int, batch: int, seed: int) -> Any:
    bayesian = hasattr(optimizer, "posterior")
    kind = VariationalTrainer if bayesian else transformers.Trainer
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error", "seed": seed}
    options |= {"save_strategy": "no", "logging_strategy": "no", "num_train_epochs": epochs}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=batch, **options)
        trainer = kind(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


def batches(task: str, data: Rows) -> list[dict[str, Tensor]]:
    """For predict and calibrate, with labels where the logits are that predict them."""
    joined = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    if task == "causal":
        ends = torch.full((len(data), 1), IGNORED)
        joined["labels"] = torch.cat([joined["labels"][:, 1:], ends], 1)
    return [joined]


def scores(prediction: Any, held: list[dict[str, Tensor]]) -> dict[str, float]:
    targets, probs = held[0]["labels"].flatten(), prediction.probs
    kept = targets != IGNORED
    probs, targets = probs.reshape(-1, probs.shape[-1])[kept], targets[kept]
    names = ("nll", "accuracy", "ece")
    return {name: float(getattr(credo.metrics, name)(probs, targets)) for name in names}


def laplace(task: str, model: Any, data: Rows, validation: list[dict[str, Tensor]]) -> Any:
    """Diagonal, with the squares of single sequences' gradients: σ² = 1/(Σ g² + δ), δ by validation."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    joined = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    model.eval()
    squares = credo.squared_gradients(model, lambda: model(**joined).loss)
    labels = (
        1 if task == "classify" else LENGTH - (task == "causal")
    )  # of a sequence, whose loss is their mean
    found = []
    for precision in 10.0 ** torch.arange(-1, 6):
        variance = {name: 1 / (squares[name] * labels**2 + precision) for name in own}
        posterior = credo.posterior.DiagonalPosterior({n: p.detach() for n, p in own.items()}, variance)
        prediction = credo.predict(model, posterior, validation, samples=SAMPLES)
        found.append((scores(prediction, validation)["nll"], posterior))
    return min(found, key=lambda pair: pair[0])[1]


def compare(task: str, seed: int) -> list[dict[str, Any]]:
    """The rows of all methods."""
    new = (10, 11, 12)
    data = rows(task, new, NEW, 100 + seed)
    validation = batches(task, rows(task, new, VALIDATION, 10**6))
    test = batches(task, rows(task, new, TEST, 2 * 10**6))
    weights, found = pretrained(task, seed), []

    def add(method: str, model: Any, posterior: Any, step: float, **options: Any) -> None:
        prediction = credo.predict(model, posterior, test, samples=SAMPLES, **options)
        row = {"task": task, "seed": seed, "method": method, "step": step, **scores(prediction, test)}
        found.append({**row, "seconds": round(time.process_time() - start, 1)})

    def best(make: Any, steps: tuple[float, ...]) -> tuple[float, Any, Any]:
        """By validation NLL: the step, the model and its posterior."""
        runs = []
        for step in steps:
            model = adapted(task, weights, seed)
            trainer = trained(model, data, make(model, step), EPOCHS, BATCH, seed)
            posterior = trainer.posterior() if hasattr(trainer, "posterior") else "mean"
            nll = scores(credo.predict(model, posterior, validation, samples=SAMPLES), validation)["nll"]
            runs.append((nll, step, model, posterior))
        return min(runs, key=lambda run: run[0])[1:]

    start = time.process_time()
    add("before adapting", network_of(task, weights), "mean", 0.0)

    def adamw(model: Any, rate: float) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)

    start = time.process_time()
    step, model, _ = best(adamw, RATES)
    add("AdamW", model, "mean", step)
    fitted = credo.calibrate(model, "mean", validation)
    add("AdamW, temperature", model, "mean", step, **fitted.options)
    add("Laplace", model, laplace(task, model, data, validation), step)
    for name, kind in METHODS.items():

        def bayesian(model: Any, step: float, kind: Any = kind) -> Any:
            optimizer = kind(model, data_size=NEW, seed=seed)
            for group in optimizer.param_groups:
                group["lr"] *= step
            return optimizer

        start = time.process_time()
        step, model, posterior = best(bayesian, STEPS)
        add(name, model, posterior, step)
        fitted = credo.calibrate(model, posterior, validation)
        add(f"{name}, calibrated", model, fitted.posterior, step, **fitted.options)
    return found


def network_of(task: str, weights: dict[str, Tensor]) -> Any:
    model = network(task)
    model.load_state_dict(weights)
    return model


def show(found: list[dict[str, Any]]) -> None:
    """Means over the seeds, Markdown: NLL, accuracy and ECE of each task."""
    tasks = list(dict.fromkeys(row["task"] for row in found))
    seeds = [len({row["seed"] for row in found if row["task"] == task}) for task in tasks]
    print("| |", " | ".join(f"{task} (seeds: {n})" for task, n in zip(tasks, seeds, strict=True)), "|")
    print("|---|" + "---|" * len(tasks))
    for method in dict.fromkeys(row["method"] for row in found):
        cells = []
        for task in tasks:
            own = [row for row in found if (row["task"], row["method"]) == (task, method)]
            nll, accuracy, ece = (
                sum(row[name] for row in own) / max(len(own), 1) for name in ("nll", "accuracy", "ece")
            )
            cells.append(f"{nll:.3f} / {100 * accuracy:.1f} / {ece:.3f}")
        print(f"| {method} |", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", choices=TASKS, nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["task"], row["seed"]) for row in found}
    for seed in range(0 if given.show else given.seeds):
        for task in given.tasks:
            if (task, seed) in done:
                continue
            new = compare(task, seed)
            found += new
            with given.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    show(found)


if __name__ == "__main__":
    main()
