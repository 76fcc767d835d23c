"""Builds the C++ kernels with the package; all else is in pyproject.toml.

The kernels have a plain C interface, so neither torch nor the version of Python matters to them: a wheel that
holds the library is tagged `py3-none-<platform>`, one built without a compiler `py3-none-any`.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

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


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
