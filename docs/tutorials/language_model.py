# %% [markdown]
# # Fine-tuning a language model with LoRA
#
# A small GPT-2 is trained here, from scratch. Then it learns a second language from 64 sentences, by LoRA
# adapters in Hugging Face's Trainer. Six ways to do it are compared: what does each believe about sentences
# it has not seen?
#
# You need `pip install 'credo[hf]'`. Nothing is downloaded.

# %%
import copy, math, tempfile, warnings
from pathlib import Path

import peft, torch, transformers
from matplotlib import pyplot as plt
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import credo
from credo.integrations.transformers import VariationalTrainer

WORDS, LENGTH = 16, 12
SENTENCES = 3000  # small: 64
EPOCHS = 20  # small: 1
STEPS = (1, 3, 10)  # small: (3,)

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()

# %% [markdown]
# ## Two languages
#
# A language is a table: which word follows which, and how often.


# %%
def language(seed, n, sentences_seed):
    table = (2 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))).softmax(-1)
    generator = torch.Generator().manual_seed(sentences_seed)
    ids = torch.randint(WORDS, (n, LENGTH), generator=generator)
    for t in range(1, LENGTH):
        ids[:, t] = torch.multinomial(table[ids[:, t - 1]], 1, generator=generator)[:, 0]
    return ids


def rows(ids):
    return [{"input_ids": row, "labels": row} for row in ids]


def batch(ids):
    """For predict and calibrate: the labels stand where the logits are that predict them."""
    ends = torch.full((len(ids), 1), -100)
    return {"input_ids": ids, "labels": torch.cat([ids[:, 1:], ends], 1)}


train, validation, test = (language(1, n, seed) for n, seed in ((64, 10), (100, 11), (400, 12)))

# %% [markdown]
# ## Train the base model
#
# `fit` is the Trainer as you know it. `VariationalTrainer` is the same class with a mixin: it takes every
# update at a sample of the posterior.


# %%
def fit(model, data, optimizer, epochs, kind=VariationalTrainer):
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=16, logging_strategy="no", **options
        )
        trainer = kind(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


torch.manual_seed(0)
ends = {"bos_token_id": 0, "eos_token_id": 0}
base = GPT2LMHeadModel(
    GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **ends)
)
adamw = torch.optim.AdamW(base.parameters(), lr=3e-3)
fit(base, rows(language(0, SENTENCES, 9)), adamw, epochs=2, kind=Trainer)

# %% [markdown]
# ## Adapters, with a posterior
#
# peft puts two small matrices beside each linear layer and freezes the rest. Give credo's optimiser the peft
# model: the posterior then has the adapters alone. Their steps are relative to the size of each tensor. As
# with a learning rate, three sizes are tried, and the validation NLL chooses.


# %%
def adapted():
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(copy.deepcopy(base), lora)


def scores(model, posterior, ids, **options):
    prediction = credo.predict(model, posterior, batch(ids), samples=20, **options)
    probs, targets = prediction.probs[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    return credo.metrics.nll(probs, targets), credo.metrics.accuracy(probs, targets), probs


def best(make, kind):
    found = []
    for step in STEPS:
        model = adapted()
        trainer = fit(model, rows(train), make(model, step), EPOCHS, kind)
        posterior = trainer.posterior() if kind is VariationalTrainer else "mean"
        found.append((float(scores(model, posterior, validation)[0]), step, model, posterior))
    return min(found, key=lambda run: run[0])[2:]


def point(model, step):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=step * 1e-3)


def bayesian(method):
    def make(model, step):
        optimizer = method(model, data_size=len(train))
        optimizer.param_groups[0]["lr"] *= step
        return optimizer

    return make


results = {}
model, _ = best(point, Trainer)
results["AdamW"] = scores(model, "mean", test)
for name, method in {"VOGN": credo.VOGN, "IVON": credo.IVON, "BBB": credo.BayesByBackprop}.items():
    own, posterior = best(bayesian(method), VariationalTrainer)
    results[name] = scores(own, posterior, test)
    if name == "VOGN":
        vogn, vogn_posterior = own, posterior

# %% [markdown]
# ## What needs no second training
#
# A temperature divides AdamW's logits; validation sentences fit it. A Laplace approximation puts a Gaussian
# around AdamW's adapters. Its width comes from the squared gradients of single sentences, and from a prior
# that the validation sentences choose. `credo.calibrate` also fits VOGN's width and temperature.

# %%
fitted = credo.calibrate(model, "mean", batch(validation))
results["AdamW + T"] = scores(model, "mean", test, **fitted.options)

squares = credo.squared_gradients(model, lambda: model(input_ids=train, labels=train).loss)
mean = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
candidates = []
for precision in (1, 10, 100, 1000, 10000):
    # The loss is a mean over the labels of a sentence, and the likelihood their sum.
    variance = {name: 1 / (squares[name] * (LENGTH - 1) ** 2 + precision) for name in mean}
    candidates.append(credo.posterior.DiagonalPosterior(mean, variance))
laplace = min(candidates, key=lambda q: float(scores(model, q, validation)[0]))
results["Laplace"] = scores(model, laplace, test)

fitted = credo.calibrate(vogn, vogn_posterior, batch(validation))
results["VOGN, fitted"] = scores(vogn, fitted.posterior, test, **fitted.options)

for name, (nll, accuracy, probs) in results.items():
    ece = credo.metrics.ece(probs, test[:, 1:].flatten())
    print(f"{name:13} NLL {nll:.3f}  accuracy {accuracy:.3f}  ECE {ece:.3f}")

# %% [markdown]
# ## The picture
#
# On the left, the NLL of unseen sentences; lower is better. On the right, how often the most probable word
# was right, by how probable it was said to be. Below the dashed line a model is too sure, above it not sure
# enough.

# %%
CAPTION = "Test NLL of each method, and accuracy by confidence"
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
names = sorted(results, key=lambda name: float(results[name][0]))
values = [float(results[name][0]) for name in names]
left.plot(values[::-1], names[::-1], "o")
left.grid(axis="y", linewidth=0.5)
left.set(xlabel="test NLL, nats a word")
for name in ("AdamW", "AdamW + T", "VOGN"):
    confidence, word = results[name][2].max(-1)
    correct = (word == test[:, 1:].flatten()).float()
    bins = (confidence * 8).long().clamp(max=7)
    kept = [k for k in range(8) if int((bins == k).sum()) >= 20]
    said, was = ([float(v[bins == k].mean()) for k in kept] for v in (confidence, correct))
    right.plot(said, was, marker="o", markersize=4, label=name)
right.plot([0, 1], [0, 1], "--", color="#808892", linewidth=1)
right.set(xlabel="probability of the most probable word", ylabel="how often it was right")
right.legend()

# %% [markdown]
# ## One small file
#
# `trainer.save_model()` writes `posterior.safetensors` beside the adapter, and so do checkpoints. By hand it
# is one call. The compact form keeps means exactly and rounds variances by at most 0.4 %.

# %%
with tempfile.TemporaryDirectory() as folder:
    vogn.save_pretrained(folder)
    vogn_posterior.save(Path(folder) / "posterior.safetensors", compact=True)
    sizes = {path.name: path.stat().st_size for path in Path(folder).glob("*.safetensors")}
    loaded = credo.load_posterior(Path(folder) / "posterior.safetensors")
print(f"{sizes['posterior.safetensors'] / sizes['adapter_model.safetensors']:.2f} times the adapter")
print(f"a new model with it: NLL {scores(adapted(), loaded, test)[0]:.3f}")

# %% [markdown]
# ## Does it know the language?
#
# Sentences of a third language have other pairs of words. Mutual information is the part of the doubt that
# more data would remove. Look at how little the numbers differ: the words are known, and the adapters are a
# small part of the model. A posterior over adapters improves the probabilities. It does not tell by itself
# that a text is foreign.

# %%
for name, ids in (("as trained", test), ("another language", language(2, 400, 13))):
    prediction = credo.predict(vogn, vogn_posterior, batch(ids), samples=20)
    doubt = prediction.mutual_information[:, :-1].mean()
    print(f"{name:17} entropy {prediction.entropy[:, :-1].mean():.3f}, mutual information {doubt:.4f}")
print(f"a word chosen at random: {math.log(WORDS):.3f} nats")

# %% [markdown]
# Classifiers (`SEQ_CLS`) and models from sequence to sequence (`SEQ_2_SEQ_LM`) are trained by the same lines.
# `python -m benchmarks.lora` compares the methods on all three; its numbers are in [other people's
# loops](../integrations.md).
