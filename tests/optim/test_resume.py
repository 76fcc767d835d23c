"""Saving and resuming: bitwise, also through a file, a copy, and into a process that began differently."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import InvalidValue, VersionError
from tests.optim.trained import METHODS

RUN = """
import sys, torch, torch.nn.functional as F, credo
from tests.optim.test_resume import build, train, fingerprint
torch.manual_seed(999)
model, optimizer, schedules = build(getattr(credo, sys.argv[1]), seed=5)
saved = torch.load(sys.argv[2], weights_only=True)
model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
for schedule, state in zip(schedules, saved["schedules"], strict=True): schedule.load_state_dict(state)
train(model, optimizer, schedules, range(5, 9))
torch.save(fingerprint(model, optimizer), sys.argv[3])
"""


def build(method, seed: int = 0, dtype: torch.dtype = torch.float32, **options):
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)
    ).to(dtype)
    optimizer = method(model, data_size=60, seed=seed, **options)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return model, optimizer, [rate, credo.TemperingSchedule(optimizer, 0.2, 1.0, 6)]


def train(model, optimizer, schedules, steps) -> None:
    for t in steps:
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(6, 1, 5, 5, generator=generator).to(next(model.parameters()).dtype)
        y = torch.randint(0, 3, (6,), generator=generator)
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x).float(), y, reduction="none"))
        for schedule in schedules:
            schedule.step()


def fingerprint(model, optimizer) -> dict:
    state = {
        f"{k}.{name}": v for k, p in enumerate(optimizer.state) for name, v in optimizer.state[p].items()
    }
    groups = {
        f"{k}.{name}": torch.tensor(float(group[name]))
        for k, group in enumerate(optimizer.param_groups)
        for name in ("lr", "tempering")
    }
    with optimizer.sampled():
        sample = {f"sample.{name}": p.detach().clone() for name, p in model.named_parameters()}
    return {**model.state_dict(), **state, **groups, **sample}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_bitwise(method, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, optimizer, schedules = build(method, dtype=dtype)
    train(model, optimizer, schedules, range(5))
    file = io.BytesIO()
    everything = [model.state_dict(), optimizer.state_dict(), [s.state_dict() for s in schedules]]
    torch.save(everything, file)
    train(model, optimizer, schedules, range(5, 9))
    expected = fingerprint(model, optimizer)

    other, resumed, others = build(method, dtype=dtype, seed=0)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for schedule, state in zip(others, saved[2], strict=True):
        schedule.load_state_dict(state)
    train(other, resumed, others, range(5, 9))
    assert_same(fingerprint(other, resumed), expected)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    learned = ("curvature", "momentum", "log_variance")
    assert all(s[name].dtype == wide for s in resumed.state.values() for name in learned if name in s)


@pytest.mark.parametrize("method", METHODS)
def test_resume_in_a_process_that_began_with_another_seed(method, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, optimizer, schedules = build(method)
    train(model, optimizer, schedules, range(5))
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedules": [s.state_dict() for s in schedules],
    }
    torch.save(saved, tmp_path / "saved.pt")
    train(model, optimizer, schedules, range(5, 9))
    arguments = [method.__name__, str(tmp_path / "saved.pt"), str(tmp_path / "end.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN, *arguments], check=True, timeout=120)
    assert_same(torch.load(tmp_path / "end.pt", weights_only=True), fingerprint(model, optimizer))


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("method", METHODS)
def test_copies_go_on_alike_and_apart(method, copies):
    model, optimizer, _ = build(method)
    train(model, optimizer, [], range(3))
    twin, other = copies((model, optimizer))
    assert other.counters == optimizer.counters
    train(model, optimizer, [], range(3, 6))
    assert other.counters["step"] == 3
    train(twin, other, [], range(3, 6))
    assert_same(fingerprint(model, optimizer), fingerprint(twin, other))


def test_a_state_dict_of_something_else_is_refused_and_nothing_changes():
    model, optimizer, _ = build(credo.VOGN)
    train(model, optimizer, [], range(2))
    before = fingerprint(model, optimizer)
    other = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    shaped = credo.VOGN(other, data_size=60)
    train(other, shaped, [], range(1))
    newer = optimizer.state_dict()
    newer["credo"] = {**newer["credo"], "version": 99}
    refused = {
        "was not saved by a credo optimiser": (
            torch.optim.Adam(model.parameters()).state_dict(),
            InvalidValue,
        ),
        "saved by OGN": (build(credo.OGN)[1].state_dict(), InvalidValue),
        "another model": (shaped.state_dict(), InvalidValue),
        "Upgrade credo": (newer, VersionError),
    }
    for message, (state, kind) in refused.items():
        with pytest.raises(kind, match=message):
            optimizer.load_state_dict(state)
    optimizer.counters["draws"] -= 1
    assert_same(fingerprint(model, optimizer), before)


def test_drift_of_settings_is_worth_a_warning():
    _, optimizer, _ = build(credo.VOGN)
    _, other, _ = build(credo.VOGN, seed=3)
    with pytest.warns(UserWarning, match="seed: saved 0, here 3"):
        other.load_state_dict(optimizer.state_dict())
    assert other.settings["seed"] == 0
