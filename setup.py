"""Builds the C++ kernels with the package; all else is in pyproject.toml.

The kernels have a plain C interface, so neither torch nor the version of Python matters to them: a wheel that
holds the library is tagged `py3-none-<platform>`, one built without a compiler `py3-none-any`.

The same commit gives the same bits: what is packed has the date of the commit.
"""

import gzip
import importlib.util
import os
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

KERNELS = Path("src/credo/kernels")


def load_builder() -> ModuleType:
    """Load `kernels/build.py` by its path: importing the package would need torch, absent when pip builds."""
    spec = importlib.util.spec_from_file_location("credo_kernels_build", KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


class BuildWithKernels(build_py):
    """Puts the compiled library beside the modules of `kernels/`: in the tree itself when editable."""

    def run(self) -> None:
        super().run()
        target = KERNELS if self.editable_mode else Path(self.build_lib, "credo", "kernels")
        library = load_builder().build(target)
        self.distribution.has_kernels = library is not None
        if library is None:
            print("credo: the C++ kernels were not built; the package will run on its pure-torch twin.")


class PlatformDistribution(Distribution):
    """Tells setuptools that a compiled file may come along, though it is no Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for one platform but any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not getattr(self.distribution, "has_kernels", False):
            return "py3", "none", "any"
        return "py3", "none", super().get_tag()[2]


class DatedSource(sdist):
    """An archive that depends on the files alone, not on when and by whom they were checked out."""

    def make_archive(self, base_name: str, format: str, *args: object, **options: object) -> str:
        if format != "gztar" or "SOURCE_DATE_EPOCH" not in os.environ:
            return str(super().make_archive(base_name, format, *args, **options))
        date, folder = int(os.environ["SOURCE_DATE_EPOCH"]), Path(str(options["base_dir"]))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = Path(f"{base_name}.tar.gz")
        with (
            path.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for file in sorted([folder, *folder.rglob("*")]):
                archive.add(file, recursive=False, filter=plain)
        return str(path)


def set_date() -> None:
    """SOURCE_DATE_EPOCH, unless given: the date of the commit; in an unpacked archive, the date of its files."""
    if Path(".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    else:
        found = str(int(Path("PKG-INFO").stat().st_mtime)) if Path("PKG-INFO").exists() else ""
    if found:
        os.environ.setdefault("SOURCE_DATE_EPOCH", found)


set_date()
setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel, "sdist": DatedSource},
)
