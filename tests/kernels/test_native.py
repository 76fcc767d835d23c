"""Building, finding and choosing the compiled kernels."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import credo.kernels
from credo.errors import InvalidValue
from credo.kernels import native

BUILDER = Path(native.__file__).with_name("build.py")


@pytest.fixture
def builder() -> ModuleType:
    """As setup.py loads it: by its path."""
    spec = importlib.util.spec_from_file_location("builder", BUILDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python with the environment changed."""
    source = str(Path(credo.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def _environment_is_read_afresh() -> Iterator[None]:
    native.environment.cache_clear()
    yield
    native.environment.cache_clear()


def test_status_tells_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDO_KERNELS", raising=False)
    status = credo.kernels.status()
    assert status.threads == torch.get_num_threads()
    assert status.enabled == bool(native.available())
    assert status.instruction_set == (native.available() or ("none",))[-1]
    assert str(status).startswith("credo kernels: ")


def test_off_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "off")
    status = credo.kernels.status()
    assert not status.enabled
    assert "CREDO_KERNELS" in status.reason
    assert native.kernel("convolution_f32") is None


@pytest.mark.parametrize("chosen", native.available())
def test_chosen_by_environment(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", chosen)
    assert credo.kernels.status().instruction_set == chosen
    assert native.kernel("convolution_f32") is not None


def test_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "fast")
    with pytest.raises(InvalidValue, match="CREDO_KERNELS is 'fast'; allowed: off, baseline, avx2, avx512"):
        credo.kernels.status()
    with pytest.raises(InvalidValue, match="forced"), credo.kernels.forced("fast"):
        pass


@pytest.mark.skipif(not native.available(), reason="the kernels were not built")
def test_what_the_machine_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: ("baseline",))
    with credo.kernels.forced("avx512"), pytest.raises(InvalidValue, match="can run: off, baseline"):
        native.kernel("convolution_f32")


def test_forced_is_undone_and_stays_in_its_thread() -> None:
    seen: list[bool] = []
    before = credo.kernels.status()
    with credo.kernels.forced("off"):
        thread = threading.Thread(target=lambda: seen.append(credo.kernels.status().enabled))
        thread.start()
        thread.join()
        assert not credo.kernels.status().enabled
    assert seen == [before.enabled]
    assert credo.kernels.status() == before


def test_without_a_library_the_reference_runs_and_says_so_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, warnings, torch
import credo.kernels.native as native
from credo.kernels.convolution import weight_sums
native.LIBRARY = pathlib.Path({str(tmp_path)!r}) / "missing.so"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        weight_sums(torch.ones(2, 3, 5, 5), torch.ones(2, 4, 3, 3), (3, 3), (1, 1), (0, 0), (1, 1), 1)
print(len(caught), native.status())
"""
    finished = run(code, CREDO_KERNELS="")
    assert finished.stdout.startswith("1 credo kernels: pure torch"), finished.stderr


@pytest.mark.skipif(
    not native.available() or sys.platform != "linux", reason="reads /proc, and needs the library"
)
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """Two runtimes would have two pools of threads, each as large as the machine.

    In a process of its own: other packages (scikit-learn) bring runtimes for themselves.
    """
    code = (
        "from credo.kernels import native; native.load();"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line};"
        "print(sum(any(name in path for name in ('libgomp', 'libomp', 'libiomp')) for path in maps))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "1"


def test_builder_needs_nothing_but_python() -> None:
    finished = subprocess.run([sys.executable, "-S", "-c", f"import runpy; runpy.run_path({str(BUILDER)!r})"])
    assert finished.returncode == 0


def test_without_a_compiler_there_is_a_reason(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert builder.build(tmp_path) is None
    assert "found no C++ compiler" in capsys.readouterr().err


def test_a_compiler_that_fails_is_quoted(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "false")
    assert builder.build(tmp_path) is None
    assert "`false -std=c++17" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
