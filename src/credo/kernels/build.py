"""Compile the C++ kernels into one shared library: `python src/credo/kernels/build.py [directory]`.

Every source is compiled once per instruction set and all of it is linked into one file with a plain C interface, so
that neither torch nor its headers are needed and one library runs on any machine of its architecture. `setup.py` loads
this file by its path, before the package and torch exist: standard library only.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "source"
LIBRARY = "libcredo_kernels.dylib" if sys.platform == "darwin" else "libcredo_kernels.so"
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
AVX512 = [
    "-mavx2",
    "-mfma",
    "-mavx512f",
    "-mavx512dq",
    "-mavx512bw",
    "-mavx512vl",
    "-mprefer-vector-width=512",
]
X86_64 = {"baseline": [], "avx2": ["-mavx2", "-mfma"], "avx512": AVX512}  # the order is from worst to best


class CompilationFailed(Exception):
    """There is no library, and the message says why."""


def build(target: str | os.PathLike[str]) -> Path | None:
    """Compile the library into `target`; None, and the reason on the standard error stream, when that fails."""
    try:
        return compile_library(Path(target))
    except CompilationFailed as reason:
        print(f"credo: no C++ kernels: {reason}", file=sys.stderr)
        return None


def compile_library(target: Path) -> Path:
    """Compile the library into `target`, or raise CompilationFailed."""
    compiler = find_compiler()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        openmp = openmp_flags(compiler, Path(directory))
        jobs = [
            pool.submit(compile_source, [*compiler, *COMMON, *openmp, *flags], source, name, Path(directory))
            for name, flags in instruction_sets().items()
            for source in sorted(SOURCES.glob("*.cpp"))
        ]
        objects = [str(job.result()) for job in jobs]
        linked = Path(directory, LIBRARY)
        run([*compiler, "-shared", *openmp, *objects, "-o", str(linked)])
        # Renamed into place, never written over: a process may be running the old library.
        arriving = target / f".{LIBRARY}.{os.getpid()}"
        shutil.copy(linked, arriving)
        os.replace(arriving, target / LIBRARY)
    return target / LIBRARY


def find_compiler() -> list[str]:
    """The C++ compiler as a command: `CXX` when it is set, else the usual names."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise CompilationFailed("found no C++ compiler (set CXX, or install g++ or clang++)")


def instruction_sets() -> dict[str, list[str]]:
    """The flags of every instruction set this architecture is compiled for, by name."""
    return X86_64 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": []}


def openmp_flags(compiler: list[str], directory: Path) -> list[str]:
    """`-fopenmp` where the compiler has it; without it the kernels run on one thread."""
    probe = directory / "probe.cpp"
    probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n")
    try:
        run([*compiler, "-fopenmp", str(probe), "-o", str(directory / "probe")])
    except CompilationFailed:
        return []
    return ["-fopenmp"]


def compile_source(command: list[str], source: Path, instruction_set: str, directory: Path) -> Path:
    """Compile one source for one instruction set, which its exported names carry."""
    compiled = directory / f"{source.stem}_{instruction_set}.o"
    names = [f"-DCREDO_ISA={instruction_set}", f"-DCREDO_ISA_{instruction_set.upper()}"]
    run([*command, *names, "-c", str(source), "-o", str(compiled)])
    return compiled


def run(command: list[str]) -> None:
    """Run a compiler; its complaint becomes the reason of CompilationFailed."""
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise CompilationFailed(f"`{shlex.join(command)}` failed:\n{finished.stderr.strip()}")


if __name__ == "__main__":
    made = build(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    print(made if made else "the package will run in plain torch")
    sys.exit(made is None)
