"""The Triton programs, compiled ahead of time for GPUs that nobody here has: they compile, no register is spilled to
memory, and matrix products use tensor cores.

What is compiled is what the functions of `credo.kernels.triton` would start for tensors of these kinds. ptxas and
cuobjdump come with Triton.
"""

import os
import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from credo.kernels import update
from credo.kernels.convolution import Geometry
from credo.kernels.triton import launching, lists, normalisation, sums

triton = pytest.importorskip("triton", reason="triton is not installed")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = [
    pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this triton has no ptxas"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

TARGETS = [80, 90, 100]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
PRODUCTS = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*"  # of tensor cores


class Launch(NamedTuple):
    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Usage(NamedTuple):
    registers: int
    stack: int
    shared: int
    local: int


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would have been started."""
    seen: list[Launch] = []

    def record(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> bool:
        seen.append(Launch(name, grid, arguments, constants))
        return True

    for module in (lists, sums, normalisation):
        monkeypatch.setattr(module, "launch", record)
    return seen


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind; within a run the same program is compiled once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def compiled(launch: Launch, capability: int) -> Any:
    """As Triton itself would have compiled it for these arguments: ones are constants, and 16 divides what it does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    file, _, function = launch.name.partition(".")
    program = getattr(import_module(f"credo.kernels.triton.programs.{file}"), function)
    constants = {key: launching._constant(value) for key, value in launch.constants.items()}
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    types, divisible = dict.fromkeys(constants, "constexpr"), {}
    for k, (parameter, value) in enumerate(zip(program.params, launch.arguments, strict=False)):
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            types[parameter.name], constants[parameter.name] = "constexpr", 1
            continue
        types[parameter.name] = mangle_type(value)
        if number % 16 == 0 and not parameter.do_not_specialize:
            divisible[k,] = [["tt.divisibility", 16]]
    assert set(types) == set(program.arg_names)
    source = ASTSource(
        fn=program,
        signature={name: types[name] for name in program.arg_names},
        constexprs={(program.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(cubin: bytes, folder: Path) -> Usage:
    (folder / "program.cubin").write_bytes(cubin)
    command = [TOOLS / "cuobjdump", "-res-usage", folder / "program.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    return Usage(*map(int, found.groups()))


def row(dtype: torch.dtype = torch.float32, count: int = 62) -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=dtype) for _ in range(count)]


def of_lists(name: str, dtype: torch.dtype = torch.float32, full: bool = True) -> None:
    """A program of lists, with all that it can do or with as little as it can."""
    own = [row(dtype) for _ in range(9)]
    flag = torch.tensor(True) if full else None
    if name == "sample":
        lists.sample(
            *own[:3], [0.1] * 62, own[3] if full else [0.1] * 62, 1, 2, range(62), own[4] if full else None
        )
    elif name == "perturb":
        lists.perturb(own[0][0], own[1][0], 1, 2, 3, 1e-30)
    elif name == "all_finite":
        lists.all_finite(own[0])
    elif name == "vogn":
        numbers = update.VOGNNumbers(0.1, 0.9, 0.1, 0.1, 1.0, 1.0)
        lists.vogn(
            *own[:5], *((*own[5:7], numbers, *own[7:]) if full else (0.1, None, numbers, None, None)), flag
        )
    elif name == "ivon":
        numbers = update.IVONNumbers(0.1, 0.9, 0.1, 1.0, 1.0, 1.0, 1.0)
        lists.ivon(*own[:5], *((*own[5:7], numbers, own[7]) if full else (0.1, None, numbers, None)), flag)
    else:
        lists.restore(*own[:4], full)


LISTS: dict[str, Callable[[], None]] = {
    "sample": lambda: of_lists("sample"),
    "sample float64": lambda: of_lists("sample", torch.float64),
    "perturb": lambda: of_lists("perturb"),
    "all_finite": lambda: of_lists("all_finite"),
    "vogn": lambda: of_lists("vogn"),
    "vogn float64": lambda: of_lists("vogn", torch.float64),
    "ivon": lambda: of_lists("ivon"),
    "restore": lambda: of_lists("restore"),
    **{
        f"{name}, the least": (lambda name=name: of_lists(name, full=False))
        for name in ("sample", "vogn", "ivon")
    },
}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("case", LISTS)
def test_lists(case, capability, started, tmp_path):
    LISTS[case]()
    (launch,) = started
    found = usage(compiled(launch, capability).asm["cubin"], tmp_path)
    assert found.stack == found.local == 0, found


def sequence(dtype: torch.dtype) -> None:
    sums.sequence_sums(torch.zeros(8, 128, 512, dtype=dtype), torch.zeros(8, 128, 768, dtype=dtype))


def convolution(dtype: torch.dtype, last: bool, inputs: int = 64, outputs: int = 64, groups: int = 1) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    x, g = (torch.zeros(2, n, 32, 32, dtype=dtype).to(memory_format=layout) for n in (inputs, outputs))
    sums.convolution_sums(x, g, Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups))


SUMS: dict[str, Callable[[torch.dtype], None]] = {
    "linear": sequence,
    "convolution": lambda dtype: convolution(dtype, last=False),
    "convolution, channels last": lambda dtype: convolution(dtype, last=True),
}
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32, "ieee": torch.float32}


def told(monkeypatch: pytest.MonkeyPatch, kind: str) -> torch.dtype:
    """The type of the inputs; how float32 is multiplied is a setting of torch."""
    monkeypatch.setattr(sums, "_tf32", lambda convolution: kind == "tf32")
    return KINDS[kind]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SUMS)
def test_sums(case, kind, capability, started, tmp_path, monkeypatch):
    SUMS[case](told(monkeypatch, kind))
    (launch,) = started
    program = compiled(launch, capability)
    found = usage(program.asm["cubin"], tmp_path)
    assert found.stack == found.local == 0, found
    products = re.findall(PRODUCTS, program.asm["ptx"])
    assert bool(products) == (kind != "ieee")
    assert capability == 100 or all(".f32." in product for product in products)  # what they add up in


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(3, 64, 1), (64, 64, 64), (1, 6, 1)])
def test_layers_with_few_channels(inputs, outputs, groups, started, tmp_path):
    convolution(torch.float32, False, inputs, outputs, groups)
    (launch,) = started
    found = usage(compiled(launch, 90).asm["cubin"], tmp_path)
    assert found.stack == found.local == 0, found


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("last", [False, True])
def test_batch_norm(last, capability, started, tmp_path):
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.zeros(8, 64, 32, 32).to(memory_format=layout)
    normalisation.batch_norm_backward(
        x, x.clone(), torch.ones(64), torch.zeros(64), torch.ones(64), True, True
    )
    assert len(started) == 3
    for launch in started:
        found = usage(compiled(launch, capability).asm["cubin"], tmp_path)
        assert found.stack == found.local == 0, found


def test_one_program_serves_all_draws_and_steps(started):
    """Seeds, streams, sizes of a list and rates are arguments that no program depends on."""
    for seed, stream, count in ((1, 2, 62), (2**64 - 1, 2**40, 60)):
        own = [row(count=count) for _ in range(3)]
        lists.sample(*own, [0.1 * seed] * count, [0.1] * count, seed, stream, range(count))
    first, second = started
    assert first.constants == second.constants
    keys = {"seed_low", "seed_high", "stream_low", "stream_high", "count"}
    for name in ("sample", "perturb", "vogn", "ivon", "all_finite", "restore"):
        program = getattr(import_module("credo.kernels.triton.programs.lists"), name)
        scalars = {p.name for p in program.params if p.name in keys}
        assert scalars == {p.name for p in program.params if p.do_not_specialize}
    assert all(-(2**31) <= value < 2**31 for launch in started for value in launch.arguments[2:])
