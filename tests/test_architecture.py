"""The promises about the code itself: who imports whom, what is never called, how long importing takes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "credo"

# Left never imports right. Names in one group stand beside each other.
ORDER = [
    {"errors", "validate"},
    {"kernels"},
    {"curvature"},
    {"posterior"},
    {"optim", "distributed"},
    {"predict"},
    {"metrics"},
    {"calibration", "baselines"},
    {"models", "data"},
    {"continual"},
    {"integrations", "sklearn"},
    {"experiments"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, group in enumerate(ORDER) for name in group}

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "torch.manual_seed",
    "torch.random.manual_seed",
    "os.system",
}
FORBIDDEN_METHODS = {"extractall"}
FORBIDDEN_ARGUMENTS = {("weights_only", False), ("shell", True)}

# The one file that may use torch beyond its documented interface.
PRIVATE_TORCH = "src/credo/curvature/torch_private.py"
# Torch documents its foreach operations by these names; the others are what all layers of a kind inherit from.
ALLOWED_OF_TORCH = ("__", "_foreach_", "_NormBase", "_BatchNorm", "_ConvNd", "_DropoutNd")
PRIVATE_OF_NODES = {"_backward_cls", "_input_metadata", "_sequence_nr"}

LINE_LIMIT = 500

SOURCES = sorted(PACKAGE.rglob("*.py"))
LENGTH_CHECKED = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cpp", ".h"}
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(module: str) -> str:
    """The part of the package a dotted name lies in: `credo.optim.vogn` → `optim`; `credo` → nothing."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.AST, path: Path) -> Iterator[str]:
    """Absolute names of all that is imported anywhere in the file, inside functions too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_within_package(module: str) -> bool:
    return module.split(".")[0] == "credo"


def wrong_imports(source: str, path: Path) -> list[str]:
    here = part_of(module_of(path))
    found = [name for name in imported_modules(ast.parse(source), path) if is_within_package(name)]
    return [name for name in found if RANK.get(part_of(name), len(ORDER)) > RANK[here]]


def forbidden(source: str) -> list[str]:
    """What the file calls or imports that nothing in the package may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_METHODS:
                found.append(f"line {node.lineno}: {called}(...)")
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if any(keyword.arg == name and value is bad for name, bad in FORBIDDEN_ARGUMENTS):
                    found.append(f"line {node.lineno}: {keyword.arg}={value}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [f"line {node.lineno}: import {name}" for name in names if "torchvision" in name]
    return found


@pytest.mark.parametrize("path", [p for p in SOURCES if p != PACKAGE / "__init__.py"], ids=name_of)
def test_left_never_imports_right(path: Path) -> None:
    here = part_of(module_of(path))
    assert here in RANK, f"credo.{here} is new: say in ORDER where it stands"
    assert wrong_imports(path.read_text(), path) == []


def test_the_import_reader_sees_through_relative_and_local_imports() -> None:
    path = PACKAGE / "posterior" / "diagonal.py"
    assert wrong_imports("def f():\n    from ..optim import vogn", path) == ["credo.optim.vogn"]
    assert wrong_imports("from ..errors import InvalidValue\nfrom . import files\nimport torch", path) == []
    assert wrong_imports("from credo import VOGN", path) == ["credo.VOGN"]
    assert wrong_imports("import credo.cli", path) == ["credo.cli"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_forbidden_is_called(path: Path) -> None:
    assert forbidden(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "torch.load(f, weights_only=False)",
        "pickle.load(f)",
        "archive.extractall()",
        "run('ls', shell=True)",
        "import torchvision.transforms",
        "from torchvision import models",
        "torch.manual_seed(0)",
    ],
)
def test_the_forbidden_is_recognised(source: str) -> None:
    assert len(forbidden(source)) == 1


def test_what_looks_like_the_forbidden_is_allowed() -> None:
    source = "model.eval(); torch.load(f, weights_only=True); json.load(f); generator.manual_seed(0)"
    assert forbidden(source) == []


def private_torch(source: str) -> list[str]:
    """Uses of torch's private modules, functions and attributes of nodes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted] if re.fullmatch(r"[\w.]+", dotted := ast.unparse(node)) else []
            own = node.attr in PRIVATE_OF_NODES or node.attr.startswith("_saved_")
            if own and ast.unparse(node.value) != "self":
                found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Constant) and str(node.value).startswith("_saved_"):
            found.append(f"line {node.lineno}: {node.value}")
        for name in names:
            first, *others = name.split(".")
            private = [own for own in others if own.startswith("_") and not own.startswith(ALLOWED_OF_TORCH)]
            if first == "torch" and private:
                found.append(f"line {node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_private_torch_is_used_in_one_file(path: Path) -> None:
    if name_of(path) != PRIVATE_TORCH:
        assert private_torch(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import DisableTorchFunction",
        "from torch.autograd.graph import _engine_run_backward",
        "from torch.utils._pytree import tree_map",
        "import torch._dynamo",
        "with torch._C.DisableTorchFunction(): pass",
        "node._saved_dim",
        "getattr(node, '_saved_dim')",
        "node._sequence_nr()",
    ],
)
def test_private_torch_is_recognised(source: str) -> None:
    assert private_torch(source)


def test_what_looks_like_private_torch_is_allowed() -> None:
    assert private_torch("torch._foreach_add_(a, b)") == []
    assert (
        private_torch(
            "self._saved_at = torch.__version__; from torch.autograd.graph import saved_tensors_hooks"
        )
        == []
    )


@pytest.mark.parametrize("path", LENGTH_CHECKED, ids=name_of)
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LINE_LIMIT, f"{lines} lines: split it"


def public_classes(tree: ast.AST) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def test_no_two_public_classes_have_one_name() -> None:
    found = [
        (name, name_of(path)) for path in SOURCES for name in public_classes(ast.parse(path.read_text()))
    ]
    names = [name for name, _ in found]
    assert [entry for entry in sorted(found) if names.count(entry[0]) > 1] == []


@pytest.mark.parametrize("name", ["vogn", "ivon", "kfac", "bayes_by_backprop", "base", "scales"])
def test_an_algorithm_sees_neither_a_pointer_nor_a_rank(name: str) -> None:
    """Names in its code: attributes, variables, imports; not words of docstrings."""
    tree = ast.parse((PACKAGE / "optim" / f"{name}.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert used & {"data_ptr", "addresses", "ctypes", "byref", "rank", "world_size", "_world"} == set()


UPDATES = {
    "vogn": "vogn_update",
    "ivon": "ivon_update",
    "kfac": "kfac_update",
    "bayes_by_backprop": "bbb_gradients",
}


@pytest.mark.parametrize(("name", "update"), UPDATES.items(), ids=UPDATES)
def test_an_update_is_as_short_as_the_algorithm_box(name: str, update: str) -> None:
    tree = ast.parse((PACKAGE / "optim" / f"{name}.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == update]
    assert (found.end_lineno or 0) - found.lineno + 1 < 15


IMPORT_PROBE = """
import sys, torch, numpy, safetensors
before = set(sys.modules)
import credo
print(*set(sys.modules) - before)
"""


def imported_with_credo() -> set[str]:
    """The modules that `import credo` brings beside those of its dependencies, in a new process."""
    probe = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(probe.stdout.split())


def test_import_is_light() -> None:
    """What costs time is counted here; the time itself is measured by `benchmarks.importing`."""
    modules = imported_with_credo()
    packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert packages == {"credo", "safetensors"}
    later = {"baselines", "cli", "continual", "data", "experiments", "models"}
    assert later & {name.split(".")[1] for name in modules if name.startswith("credo.")} == set()
    assert not any(name.startswith("torch.") for name in modules)


NAMES_PROBE = """
import credo, pkgutil, types
parts = [part.name for part in pkgutil.iter_modules(credo.__path__) if part.name != "__main__"]
missing = {*parts, *credo.__all__} - set(dir(credo))
assert not missing, missing
assert not set(credo.optim.__all__) - set(dir(credo.optim))
for name in dir(credo):
    getattr(credo, name)
for part in parts:
    found = getattr(credo, part)
    assert part == "predict" or isinstance(found, types.ModuleType), part
"""


def test_every_part_is_an_attribute_of_the_package() -> None:
    """Also those that are imported late; a new process, because a test may have imported them."""
    probe = subprocess.run([sys.executable, "-c", NAMES_PROBE], capture_output=True, text=True, cwd=ROOT)
    assert probe.returncode == 0, probe.stderr


PICTURE = (ROOT / "docs" / "architecture.md").read_text()


def table(heading: str) -> list[str]:
    """The first cells of the table under a heading of docs/architecture.md."""
    rows = re.findall(
        r"^\| *(.*?) *\|", PICTURE.partition(f"## {heading}\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    return rows[2:]  # below the head and the line under it


def test_the_picture_shows_who_may_import_whom() -> None:
    assert [set(re.findall(r"`(\w+)`", row)) for row in table("Who may import whom")] == ORDER


def test_the_picture_names_files_that_exist() -> None:
    named = set(re.findall(r"\b((?:optim|curvature|kernels|distributed)/[\w/]*(?:\.py|/)?)", PICTURE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == []


def test_the_picture_has_every_file_of_the_engine_the_methods_and_the_ranks() -> None:
    headings = {"curvature": "engine", "optim": "methods", "distributed": "ranks"}
    for part, whose in headings.items():
        heading = f"The files of the {whose}"
        there = {path.name for path in (PACKAGE / part).glob("*.py")} - {"__init__.py"}
        named = {row.strip("`") for row in table(heading)}
        assert named == there | ({"rules/"} if part == "curvature" else set())
