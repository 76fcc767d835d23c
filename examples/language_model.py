"""A posterior over a language model's LoRA adapters, trained by Hugging Face's Trainer; nothing is downloaded.

    pip install 'credo[hf]'; python -m examples.language_model

A tiny GPT-2 learns to count by ones; its adapters then learn to count by twos, and say how sure they are.
"""

import tempfile

import peft
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import credo
from credo.integrations.transformers import VariationalTrainer

WORDS, LENGTH = 40, 10


def counting(step: int, n: int = 256) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(WORDS, (n, 1), generator=torch.Generator().manual_seed(step))
    rows = (starts + step * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(
    model: torch.nn.Module, data: list[dict[str, torch.Tensor]], epochs: int, step: float = 1.0
) -> VariationalTrainer:
    options = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, **options
        )
        optimizer = credo.VOGN(model, data_size=len(data))
        optimizer.param_groups[0]["lr"] *= step  # relative to the size of each tensor
        trainer = VariationalTrainer(
            model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)
        )
        trainer.train()
    return trainer


def main(epochs: int = 30) -> tuple[float, float]:
    transformers.logging.set_verbosity_error()
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    base = GPT2LMHeadModel(config)
    trained(base, counting(1), epochs)
    lora = peft.LoraConfig(
        r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora)
    posterior = trained(
        model, counting(2), epochs, step=10
    ).posterior()  # adapters start at zero, and must grow
    print(f"{sum(t.numel() for t in posterior.mean.values())} weights have a posterior")
    doubts = []
    for name, step in (("by twos, as trained", 2), ("by fives, never seen", 5)):
        batch = torch.stack([row["input_ids"] for row in counting(step, 64)])
        prediction = credo.predict(model, posterior, {"input_ids": batch}, samples=20)
        right = (prediction.probs[:, 1:-1].argmax(-1) == batch[:, 2:]).float().mean()
        doubts.append(float(prediction.entropy[:, 1:].mean()))
        print(f"counting {name}: accuracy {right:.2f}, entropy {doubts[-1]:.2f} nats")
    return doubts[0], doubts[1]


if __name__ == "__main__":
    main()
