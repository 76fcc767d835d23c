"""VOGN beside AdamW in Hugging Face's Trainer: tiny BERT and GPT-2 from their configurations, trained from scratch.

    python -m benchmarks.language                          # both models, three seeds
    python -m benchmarks.language --model gpt2 --seeds 1 --steps 1 3 10 --alone

GPT-2 learns sequences of a Markov chain of second order; BERT tells which of three chains a sequence comes from. AdamW
has the best of three learning rates by evaluation loss, VOGN its defaults; both have the Trainer's linear schedule,
clipping and equal epochs. The evaluation loss after each epoch is printed; of VOGN also that of ten samples. --steps
are multiples of VOGN's relative step, --alone leaves AdamW out.
"""

import argparse
import tempfile
import time
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import credo
from credo.integrations.transformers import VariationalTrainer

WORDS, LENGTH, TRAIN, TEST, EPOCHS, BATCH = 20, 24, 1500, 500, 6, 32
RATES = (1e-3, 3e-3, 1e-2)
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def chain(seed: int, sharpness: float = 1.5) -> torch.Tensor:
    """Probabilities of the next word given two, (WORDS, WORDS, WORDS)."""
    generator = torch.Generator().manual_seed(seed)
    one, two = (torch.randn(WORDS, WORDS, generator=generator) for _ in range(2))
    return (sharpness * (one[:, None] + two[None])).softmax(-1)


def sequences(probabilities: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (n, LENGTH), generator=generator)
    for t in range(2, LENGTH):
        ids[:, t] = torch.multinomial(probabilities[ids[:, t - 2], ids[:, t - 1]], 1, generator=generator)[
            :, 0
        ]
    return ids


def data(model: str, n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    if model == "gpt2":
        return [{"input_ids": row, "labels": row} for row in sequences(chain(0), n, seed)]
    mixed = [0.4 * chain(k) + 0.6 / WORDS for k in range(3)]  # three chains that are hard to tell apart
    rows = [sequences(mixed[k], n // 3, seed + 100 * k) for k in range(3)]
    return [{"input_ids": row, "labels": torch.tensor(k)} for k in range(3) for row in rows[k]]


def network(model: str, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        if model == "bert":
            config = BertConfig(vocab_size=WORDS, num_labels=3, max_position_embeddings=LENGTH, **SIZES)
            return BertForSequenceClassification(config)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=LENGTH,
                n_embd=48,
                n_layer=2,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


def curve(model: str, seed: int, rate: float | None, step: float = 1.0) -> tuple[list[float], float, float]:
    """Evaluation losses after the epochs, that of ten samples at the end, and seconds; without a rate of VOGN."""
    net, train, test = network(model, seed), data(model, TRAIN, 1 + seed), data(model, TEST, 10**6)
    options = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "no",
        "seed": seed,
    }
    options |= {"num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "logging_strategy": "no"}
    options |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 100}
    kind = transformers.Trainer if rate else VariationalTrainer
    made = (
        torch.optim.AdamW(net.parameters(), lr=rate)
        if rate
        else credo.VOGN(net, data_size=len(train), seed=seed)
    )
    for group in made.param_groups if not rate else ():
        group["lr"] *= step
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=net,
            args=transformers.TrainingArguments(folder, **options),
            train_dataset=train,
            eval_dataset=test,
            optimizers=(made, None),
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        sampled = losses[-1]
        if not rate:
            trainer.evaluation_samples = 10
            sampled = trainer.evaluate()["eval_loss"]
    return losses, sampled, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("bert", "gpt2"), nargs="*", default=["gpt2", "bert"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, nargs="*", default=[1.0])
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for model in given.model:
        ratios: dict[float, list[float]] = {step: [] for step in given.steps}
        for seed in range(given.seeds):
            runs = {} if given.alone else {rate: curve(model, seed, rate) for rate in RATES}
            for rate, (losses, _, seconds) in runs.items():
                print(
                    f"{model} seed {seed} AdamW({rate:g})", *(f"{x:.4f}" for x in losses), f"{seconds:.0f} s"
                )
            for step in given.steps:
                losses, sampled, seconds = curve(model, seed, None, step)
                print(f"{model} seed {seed} VOGN, step × {step:g}:", *(f"{x:.4f}" for x in losses), end=" ")
                print(f"ten samples {sampled:.4f}, {seconds:.0f} s", flush=True)
                if runs:
                    ratios[step].append(losses[-1] / min(run[0][-1] for run in runs.values()))
        for step, found in ratios.items():
            if found:
                print(
                    f"{model}, step × {step:g}: VOGN's last loss over AdamW's", *(f"{x:.3f}" for x in found)
                )


if __name__ == "__main__":
    main()
