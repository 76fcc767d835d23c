"""Tiny language models from configurations, and sequences whose padding does not count."""

import torch

WORDS, LENGTH = 30, 8


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    options = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": LENGTH,
    }
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return seeded(
        BertForSequenceClassification, BertConfig(vocab_size=WORDS, num_labels=3, **sizes, **options)
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **options)
    return seeded(GPT2LMHeadModel, config)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return seeded(T5ForConditionalGeneration, config)


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder")
             for name, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    words = {
        "vocab_size": WORDS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    config = BartConfig(
        **words, **sizes, d_model=16, max_position_embeddings=32, dropout=0.0, forced_eos_token_id=None
    )
    return seeded(BartForConditionalGeneration, config)


def seeded(kind, config):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return kind(
            config
        ).double()  # gradients that are zero by symmetry are then 1e-17, not 1e-8 and followed


def sequences(n, model, seed=0):
    """Counting up by one to three, of different lengths: a list of examples. A classifier is asked for the step."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        start, step, length = (
            int(torch.randint(*r, (1,), generator=generator)) for r in ((1, 9), (1, 4), (4, 9))
        )
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:length] = start + step * torch.arange(length)
        ids = ids.clamp(max=WORDS - 1)
        mask = (torch.arange(LENGTH) < length).long()
        classifies = "Sequence" in type(model).__name__
        labels = torch.tensor(step - 1) if classifies else ids.masked_fill(mask == 0, -100)
        row = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if "T5" in type(model).__name__:  # as a collator would, and label smoothing needs
            row["decoder_input_ids"] = torch.cat([torch.zeros(1, dtype=torch.long), ids[:-1]])
        rows.append(row)
    return rows
