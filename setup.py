"""Ships csrc/ inside the package; with CPU_MOE_AOT=1 also the library, built ahead of time.

pip install .                                        the library is built on first import
CPU_MOE_AOT=1 pip install --no-build-isolation .     built now, for the torch that is installed (setuptools>=77)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without build isolation nobody checks pyproject.toml's build requirement
    sys.exit("torch-cpu-moe needs setuptools>=77 to build: pip install 'setuptools>=77'")
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "torch_cpu_moe"
AOT = os.environ.get("CPU_MOE_AOT", "0") == "1"


def build_ahead_of_time(target: Path) -> None:
    """Build with the loader's own code, so that sources and flags are the same; put library and record in `target`."""
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("CPU_MOE_AOT=1 builds against the installed torch: install torch, then use pip --no-build-isolation")
    # The package's __init__ would load the library that is about to be built: go past it.
    stub = types.ModuleType(PACKAGE)
    stub.__path__ = [str(ROOT / PACKAGE)]
    sys.modules.setdefault(PACKAGE, stub)
    from torch_cpu_moe import _build

    csrc = ROOT / "csrc"
    compiler = _build.find_compiler()
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        library = _build.compile_library(csrc, Path(directory), ROOT / "build" / "aot.log")
        target.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy2(library, target / "cpu_moe.so"))
    _build.record(target, copy, _build.fingerprint(csrc), compiler.version, None)


class BuildPackage(build_py):
    """build_py that adds csrc/ and, on request, the library."""

    def run(self) -> None:
        if self.editable_mode:  # the checkout is used as it is, ../csrc included
            super().run()
            return
        target = Path(self.build_lib) / PACKAGE
        # build/ outlives a build in the source tree: what was removed since would be shipped again.
        shutil.rmtree(target, ignore_errors=True)
        super().run()
        shutil.copytree(ROOT / "csrc", target / "csrc")
        if AOT:
            build_ahead_of_time(target / "_aot")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = list(super().get_outputs(include_bytecode))
        if not self.editable_mode:
            target = Path(self.build_lib) / PACKAGE
            for folder in ("csrc", "_aot"):
                outputs += [str(path) for path in (target / folder).rglob("*") if path.is_file()]
        return outputs


class Wheel(bdist_wheel):
    """The library links with no Python: any Python 3, this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return AOT


commands: dict[str, Any] = {"build_py": BuildPackage, "bdist_wheel": Wheel}
setup(cmdclass=commands, distclass=PlatformDistribution)
