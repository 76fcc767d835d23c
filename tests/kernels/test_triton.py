"""Triton without a GPU: its programs in its interpreter, the launches of a step, and what is said where it cannot run.

The interpreter is chosen when Triton is imported, so its tests run in processes of their own. So does what needs the
emulated device.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import credo
from credo.kernels import native
from credo.kernels.triton import availability, launching, offers, tables

ROOT = Path(__file__).resolve().parents[2]
installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )


@installed
@pytest.mark.parametrize("name", ["lists", "sums", "normalisation", "steps"])
def test_in_the_interpreter(name, tmp_path):
    report = tmp_path / "report.xml"
    words = ["-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    found = run([*words, f"tests/kernels/interpreted/{name}.py"], TRITON_INTERPRET="1", CREDO_KERNELS="")
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert cases
    assert not [case.get("name") for case in cases if len(case)]  # failed, broken or skipped


LAUNCHES = """
import torch, torch.nn.functional as F
from tests.device.emulated import Device
from tests.device.triton import count, offered
import credo
from credo.models import ResNet18

torch.set_num_threads(1)
x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
with Device() as seen, offered(count) as started:
    model = ResNet18(stem="cifar").to("npu")
    optimizer = credo.VOGN(model, data_size=1000)
    x, y = x.to("npu"), y.to("npu")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.counters["step"] += 20  # curvatures are measured at every step before
    optimizer.step(closure)
    seen.forget(), started.clear()
    optimizer.step(closure)
print(seen.launches.total() + len(started), len(started))
print(seen.launches.most_common(30))
"""
MOST = 450  # launches of a step of VOGN on ResNet-18; none of Triton's depends on the number of examples


def test_launches_of_a_step():
    found = run(["-c", LAUNCHES])
    assert found.returncode == 0, found.stderr[-3000:]
    launches, own = map(int, found.stdout.split("\n")[0].split())
    assert own > 20 * 5  # a convolution, its shares added up, and three of BatchNorm
    assert launches <= MOST, found.stdout


# What stands in the way, and what is said of it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if there were a GPU that all goes well with."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "A Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    forget(monkeypatch)
    return monkeypatch


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_given_up", [])
    for known in (availability.device_failure, availability.import_failure, availability.warn_once):
        known.cache_clear()


class OnCard:
    """All that is asked of a tensor."""

    is_cpu = False
    device = torch.device("cuda", 0)


@installed
def test_all_is_well(gpu):
    found = credo.kernels.status()
    assert found.accelerator == "Triton"
    assert "A Card" in found.accelerator_reason
    assert "; on the GPU: Triton; version 3" in str(found)
    assert availability.runs_for(OnCard())


def without_cuda(patch):
    patch.setattr(torch.version, "cuda", None)
    patch.setattr(torch.version, "hip", None)


def without_driver(patch):
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(availability, "has_driver", lambda: False)


def without_gpu(patch):
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(availability, "has_driver", lambda: True)


def with_old_driver(patch):
    def is_available():
        availability.warnings.warn(
            "CUDA initialization: The NVIDIA driver is too old (Triggered here)", stacklevel=1
        )
        return False

    patch.setattr(torch.cuda, "is_available", is_available)


def with_old_device(patch):
    patch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))


def on_amd(patch):
    patch.setattr(torch.version, "hip", "7.0")


def without_triton(patch):
    patch.setattr(availability, "find_spec", lambda name: None)


def with_broken_triton(patch):
    def fail(name):
        raise OSError("libtriton.so: undefined symbol\n  somewhere")

    patch.setattr(availability, "import_module", fail)


def switched_off(patch):
    patch.setattr(native, "choice", lambda: ("off", "CREDO_KERNELS"))


OBSTACLES = {
    "no CUDA": (without_cuda, "built without CUDA"),
    "no driver": (without_driver, "the NVIDIA driver is missing"),
    "no GPU": (without_gpu, "torch finds no GPU"),
    "old driver": (with_old_driver, "driver is too old"),
    "old device": (
        with_old_device,
        "A Card has compute capability 7.5, and Triton programs are for 8.0 and above",
    ),
    "AMD": (on_amd, "AMD"),
    "no Triton": (without_triton, "pip install 'credo[triton]'"),
    "broken Triton": (with_broken_triton, "cannot be imported: OSError: libtriton.so"),
    "switched off": (switched_off, "switched off by CREDO_KERNELS"),
}
OF_TORCH = ("no CUDA", "no driver", "no GPU", "old driver")  # then no tensor is on a GPU


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_are_said_in_one_line(name, gpu):
    prepare, words = OBSTACLES[name]
    prepare(gpu)
    found = credo.kernels.status()
    assert found.accelerator == ("none" if name in OF_TORCH else "plain torch")
    assert words in found.on_the_gpu
    assert "\n" not in found.on_the_gpu


@pytest.mark.parametrize("name", [name for name in OBSTACLES if name not in (*OF_TORCH, "switched off")])
def test_tensors_are_told_once(name, gpu):
    prepare, words = OBSTACLES[name]
    prepare(gpu)
    with pytest.warns(RuntimeWarning) as told:
        assert not any(availability.runs_for(OnCard()) for _ in range(3))
    (warning,) = told
    assert words in str(warning.message)
    assert "plain torch" in str(warning.message)


def test_what_was_asked_for_is_not_warned_of(gpu, recwarn):
    switched_off(gpu)
    assert not availability.runs_for(OnCard())
    assert not recwarn.list


@installed
def test_a_program_that_cannot_be_compiled_is_given_up(gpu):
    """Without a driver Triton cannot start one: launch says so once, and nothing is tried again."""
    table = tables.table([[torch.ones(3)]])
    assert table is not None
    arguments = "lists.restore", (1,), table.place, table.length
    with pytest.warns(RuntimeWarning, match="the program lists.restore could not run") as told:
        assert not launching.launch(*arguments, ADD=True, **table.constants)
    assert len(told) == 1
    assert availability.accelerator()[0] == "plain torch"
    assert not availability.runs_for(OnCard())
    before = torch.rand(3), torch.rand(3), torch.rand(3), torch.rand(3)
    own = [[t.clone()] for t in before]
    gpu.setattr(launching, "give_up", lambda program, error: None)
    assert offers.lists.restore(*own, True) is NotImplemented
    assert all(torch.equal(t, kept[0]) for t, kept in zip(before, own, strict=True))


def test_off_means_plain_torch(gpu):
    for function in offers.OFFERED:
        with credo.kernels.forced("off"):
            assert offers.where_it_runs(function)([OnCard()]) is NotImplemented


def test_every_task_has_plain_torch_behind_it():
    assert {function.__name__ for function in offers.OFFERED} <= set(credo.kernels.accelerator.TASKS)


def test_credo_does_not_import_triton():
    code = "import sys, credo, credo.kernels.triton.offers; assert 'triton' not in sys.modules"
    assert run(["-c", code]).returncode == 0
