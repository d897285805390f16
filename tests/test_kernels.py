"""The kernels of every tier without torch: builds tests/cpp/kernel_matrix.cpp and runs it, natively and emulated."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import pytest
from kernel_build import build, check
from test_system import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX only"),
]


def test_kernel_matrix(tmp_path: Path) -> None:
    check(build(compiler(), tmp_path))


CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="test_kernel_matrix runs it natively here")
@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"needs {CROSS} and {QEMU}")
def test_kernel_matrix_on_an_emulated_aarch64(tmp_path: Path) -> None:
    """The machine code of the NEON tier, run by qemu."""
    binary = build([CROSS], tmp_path, link=("-static",))
    check(binary, "--quick", runner=(QEMU,), tiers=("neon", "scalar"))
