"""docs/own_method.md by the letter: one file and one export in a copy of the package, and the tables of tests."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.kernels import forced

ROOT = Path(__file__).resolve().parents[2]
FILE, EXPORT = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_method.md").read_text(), re.DOTALL)
TABLES = ("test_blocks.py", "test_hooks.py", "test_changed_settings.py", "test_resume.py", "test_socket.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> ModuleType:
    """The file of the page as a module."""
    path = tmp_path_factory.mktemp("own") / "plain_vogn.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("plain_vogn", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_one_short_file_and_one_export():
    assert len(FILE.splitlines()) < 60
    assert len(EXPORT.splitlines()) == 2


def test_the_tables_of_tests_pick_it_up(tmp_path):
    shutil.copytree(
        Path(credo.__file__).parent, tmp_path / "credo", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "credo" / "optim" / "plain_vogn.py").write_text(FILE)
    with (tmp_path / "credo" / "optim" / "__init__.py").open("a") as exports:
        exports.write(EXPORT)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "PlainVOGN"]
    found = subprocess.run(
        [*command, *(f"tests/optim/{name}" for name in TABLES)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None
    assert int(passed[1]) >= 3 * len(TABLES)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("prior", [False, True], ids=["without", "prior"])
@pytest.mark.parametrize("samples", [1, 3])
def test_it_is_vogn_with_a_momentum_of_zero(written, samples, prior):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 4, generator=generator).double(), torch.randint(0, 3, (12,), generator=generator)
    given = {"data_size": 60, "damping": 0.05, "mc_samples": samples}
    if prior:
        given["prior"] = credo.VOGN(network(), lr=0.1, data_size=30).posterior()
    results = []
    for method, options in ((written.PlainVOGN, {}), (credo.VOGN, {"momentum": 0.0, "tempering": 1.0})):
        model = network()
        optimizer = method(model, lr=0.05, **given, **options)
        for _ in range(5):
            optimizer.step(lambda model=model: F.cross_entropy(model(x), y, reduction="none"))
        posterior = optimizer.posterior()
        results.append([*posterior.mean.values(), *posterior.variance.values()])
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


def test_its_update_is_the_equation(written):
    numbers = torch.rand(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, s, g, h = numbers
    options = {"lr": 0.1, "beta2": 0.3, "prior": 0.2, "prior_mean": None, "damping": 0.05}
    new = (0.7 * s + 0.3 * h).tolist()
    moved = [
        m - 0.1 * (a + 0.2 * m) / (b + 0.25) for m, a, b in zip(mean.tolist(), g.tolist(), new, strict=True)
    ]
    found = written.plain_update(mean, s, g, h, **options)
    for own, wanted in zip(found, (moved, new), strict=True):
        torch.testing.assert_close(own, torch.tensor(wanted, dtype=torch.float64))


def test_it_runs_without_kernels(written):
    model = nn.Linear(3, 2)
    optimizer = written.PlainVOGN(model, data_size=10)
    with forced("off"):
        for _ in range(2):
            optimizer.step(lambda: (model(torch.ones(5, 3)) - 1).square().sum(1))
    assert optimizer.counters["step"] == 2
