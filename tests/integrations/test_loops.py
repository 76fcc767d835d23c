"""The same data, batches and seed through a plain loop and every other library's: the same parameters."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import InvalidValue, UnsupportedOperation

EPOCHS, BATCH = 2, 8
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


@pytest.fixture(autouse=True)
def _streams():
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def network():
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return model


def optimizer_of(model, **options):
    return credo.VOGN(model, data_size=len(X), **options)


def loader(size=BATCH):
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def plain(parts=1, clip=None):
    """The batches of 8, each at once; `parts` is how the others cut them."""
    model = network()
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for x, y in loader():
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def with_transformers(parts=1, clip=None):
    pytest.importorskip("accelerate", reason="extra: hf")
    transformers = pytest.importorskip("transformers", reason="extra: hf")
    from credo.integrations.transformers import VariationalTrainer

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels=None):
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class InOrder(VariationalTrainer.__mro__[1], transformers.Trainer):
        def get_train_dataloader(self):
            rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
            return self.accelerator.prepare(DataLoader(rows, batch_size=BATCH // parts))

    model = Inner()
    options = {"num_train_epochs": EPOCHS, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    options |= {"save_strategy": "no", "lr_scheduler_type": "constant", "max_grad_norm": clip or 0.0}
    arguments = transformers.TrainingArguments("unused", gradient_accumulation_steps=parts, **options)
    InOrder(model=model, args=arguments, train_dataset=X, optimizers=(optimizer_of(model), None)).train()
    return model.net


def with_accelerate(parts=1, clip=None, closure=False):
    pytest.importorskip("accelerate", reason="extra: hf")
    from accelerate.state import AcceleratorState, GradientState

    from credo.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = network()
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader(BATCH // parts))
    for _ in range(EPOCHS):
        for x, y in batches:
            with accelerator.accumulate(model):

                def loss_of(x=x, y=y):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    return loss

                if closure:
                    optimizer.step(loss_of)
                    continue
                with optimizer.sampled():
                    accelerator.backward(F.cross_entropy(model(x), y))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.posterior().mean.keys() == dict(network().named_parameters()).keys()
    GradientState._reset_state()  # a number of micro-batches is remembered by the process
    return accelerator.unwrap_model(model)


def with_accelerate_and_a_closure(parts=1, clip=None):
    if clip:
        pytest.skip("a closure that clips is the user's own")
    return with_accelerate(parts, closure=True)


def lightning_module(lightning, manual):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.automatic_optimization = not manual

        def training_step(self, batch, _):
            if not manual:
                return F.cross_entropy(self.net(batch[0]), batch[1])
            optimizer = self.optimizers()
            with optimizer.sampled():
                self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()
            return None

        def configure_optimizers(self):
            return optimizer_of(self.net)

    return Module()


def with_lightning(parts=1, clip=None, manual=False, callbacks=None, **options):
    lightning = pytest.importorskip("lightning", reason="extra: lightning")
    from credo.integrations.lightning import PosteriorCallback

    module = lightning_module(lightning, manual)
    options |= {"accumulate_grad_batches": parts} if parts > 1 else {}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=clip,
        callbacks=[PosteriorCallback()] if callbacks is None else callbacks,
        **options,
    )
    trainer.fit(module, loader(BATCH // parts))
    module.trainer_of_test = trainer
    return module.net


def with_lightning_by_hand(parts=1, clip=None):
    if parts > 1 or clip:
        pytest.skip("micro-batches and clipping are the user's own in manual optimisation")
    return with_lightning(manual=True)


def with_skorch(parts=1, clip=None):
    skorch = pytest.importorskip("skorch", reason="extra: skorch")
    if parts > 1:
        pytest.skip("skorch has no accumulation")
    from credo.integrations.skorch import VariationalNetClassifier

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

    options = {"train_split": None, "verbose": 0, "batch_size": BATCH, "max_epochs": EPOCHS}
    clipping = [skorch.callbacks.GradientNormClipping(clip)] if clip else None
    net = VariationalNetClassifier(
        Module, criterion=nn.CrossEntropyLoss, optimizer__data_size=len(X), callbacks=clipping, **options
    ).fit(X.numpy(), Y.numpy())
    probs = net.predict_proba(X.numpy())
    expected = credo.predict(net.module_, net.posterior(), X, samples=10, seed=0).probs
    assert abs(torch.from_numpy(probs) - expected).max() < 1e-9
    assert (net.predict(X.numpy()) == probs.argmax(1)).all()
    return net.module_.net


@pytest.mark.parametrize("regresses", [False, True])
def test_skorch_as_it_comes(regresses):
    """With its validation split, whose outputs callbacks read while it trains."""
    pytest.importorskip("skorch", reason="extra: skorch")
    from credo.integrations import skorch as ours

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1 if regresses else 3)

        def forward(self, x):
            return self.net(x)

    kind = ours.VariationalNetRegressor if regresses else ours.VariationalNetClassifier
    y = X[:, :1].float() if regresses else Y
    options = {} if regresses else {"criterion": nn.CrossEntropyLoss}
    net = kind(Module, optimizer__data_size=25, max_epochs=3, batch_size=8, verbose=0, **options)
    net.fit(X.float().numpy(), y.numpy())
    assert len(net.history[:, "valid_loss"]) == 3
    assert regresses or 0 <= net.history[-1, "valid_acc"] <= 1
    averaged = net.predict(X.float().numpy()) if regresses else net.predict_proba(X.float().numpy())
    assert averaged.shape == (32, 1 if regresses else 3)
    net.samples = 1
    one = net.predict(X.float().numpy()) if regresses else net.predict_proba(X.float().numpy())
    assert abs(averaged - one).max() > 1e-6


LOOPS = [
    *(with_transformers, with_accelerate, with_accelerate_and_a_closure),
    *(with_lightning, with_lightning_by_hand, with_skorch),
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_loop_gives_the_same_parameters(loop, parts, clip):
    found, expected = loop(parts, clip), plain(clip=clip)
    for p, q, start in zip(found.parameters(), expected.parameters(), network().parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6
        assert (q - start).abs().max() > 1e-4


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON, credo.NoisyKFAC], ids=lambda m: m.__name__)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_an_epoch_that_does_not_divide(loop, method, monkeypatch):
    """21 examples are 8, 8 and 5: the last update has three micro-batches instead of four, of 2, 2 and 1 examples."""
    if method is not credo.VOGN and loop not in (with_accelerate, with_lightning):
        pytest.skip("one method is enough where the loop weighs micro-batches by itself, or has none")
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "X", X[:21])
    monkeypatch.setattr(here, "Y", Y[:21])
    monkeypatch.setattr(here, "optimizer_of", lambda model: method(model, data_size=21))
    for p, q in zip(loop(4, 0.05).parameters(), plain(clip=0.05).parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6


def test_accelerates_checkpoints_resume_bit_for_bit(tmp_path):
    pytest.importorskip("accelerate", reason="extra: hf")
    from credo.integrations.accelerate import Accelerator

    def run(steps, load=None, save=None):
        accelerator = Accelerator(cpu=True)
        model = network()
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if load is not None:
            accelerator.load_state(load)
        for x, y in list(loader())[steps]:
            with optimizer.sampled():
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
        if save is not None:
            accelerator.save_state(save)
        return optimizer.posterior()

    whole = run(slice(0, 4))
    run(slice(0, 2), save=str(tmp_path / "half"))
    resumed = run(slice(2, 4), load=str(tmp_path / "half"))
    for name, mean in whole.mean.items():
        assert torch.equal(mean, resumed.mean[name])
        assert torch.equal(whole.variance[name], resumed.variance[name])


def test_mixed_precision_of_accelerate_is_close():
    pytest.importorskip("accelerate", reason="extra: hf")
    from accelerate.state import AcceleratorState

    from credo.integrations.accelerate import Accelerator

    def run(precision):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = network().float()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        for x, y in loader():
            loss = optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x.float()), y))
        AcceleratorState._reset_state(True)
        assert loss.isfinite()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    full, half = run("no"), run("bf16")
    start = torch.cat([p.detach().flatten().float() for p in network().parameters()])
    assert 0 < (full - half).norm() < 0.2 * (full - start).norm()


def test_what_lightnings_callback_logs_and_saves(tmp_path):
    lightning = pytest.importorskip("lightning", reason="extra: lightning")
    from credo.integrations.lightning import PosteriorCallback

    module = lightning_module(lightning, manual=False)
    module.forward = lambda x: module.net(x)
    callback = PosteriorCallback((X, Y), save="q.safetensors")
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = lightning.Trainer(
        max_epochs=3, callbacks=[callback], default_root_dir=tmp_path, enable_model_summary=False, **options
    )
    trainer.fit(module, loader())
    optimizer = trainer.optimizers[0]
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    scores = credo.evaluate(credo.predict(module.net, optimizer.posterior(), X), Y)
    assert abs(found["posterior/nll"] - scores["nll"]) < 1e-6
    assert abs(found["posterior/ece"] - scores["ece"]) < 1e-6
    assert found["posterior/elbo"] < -len(X) * 0.1
    assert found["posterior/kl"] > 0
    assert 0 <= found["posterior/group0/curvature_share"] <= 1
    saved = credo.load_posterior(tmp_path / "q.safetensors")
    assert all(torch.equal(saved.mean[n], m) for n, m in optimizer.posterior().mean.items())
    assert type(optimizer).step.__get__(optimizer) == optimizer.step  # as it was before


def test_a_failure_amid_micro_batches_leaves_the_mean():
    lightning = pytest.importorskip("lightning", reason="extra: lightning")
    from credo.integrations.lightning import PosteriorCallback

    module = lightning_module(lightning, manual=False)
    own, made = module.training_step, []

    def fail(batch, batch_idx):
        made.append(module.trainer.optimizers[0])
        if batch_idx == 2:  # the third of four
            raise ArithmeticError("amid")
        return own(batch, batch_idx)

    module.training_step = fail
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=[PosteriorCallback()],
        enable_model_summary=False,
        **options,
    )
    with pytest.raises(ArithmeticError, match="amid"):
        trainer.fit(module, loader(2))
    for p, q in zip(module.net.parameters(), network().parameters(), strict=True):
        assert torch.equal(p, q)
    assert made[0].counters["step"] == 0
    made[0].posterior()  # which an open block would refuse


def test_what_cannot_be_done_is_named():
    pytest.importorskip("accelerate", reason="extra: hf")
    from credo.integrations.updates import UpdateBlock, unwrapped_optimizer

    with pytest.raises(UnsupportedOperation, match="mc_samples must be 1"):
        UpdateBlock().begin(optimizer_of(network(), mc_samples=2))
    with pytest.raises(InvalidValue, match="SGD without a posterior"):
        unwrapped_optimizer(torch.optim.SGD(network().parameters()))
