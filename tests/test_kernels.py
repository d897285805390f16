"""The kernels of every tier without torch: builds tests/cpp/kernel_matrix.cpp and runs it natively."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_system import ROOT, compiler

FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off"]
SOURCES = [
    ROOT / "tests/cpp/kernel_matrix.cpp",
    *sorted((ROOT / "csrc/formats").glob("*.cpp")),
    ROOT / "csrc/simd/tier.cpp",
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
def test_kernel_matrix(tmp_path: Path) -> None:
    command = compiler()
    binary = tmp_path / "kernel_matrix"
    built = subprocess.run([*command, *FLAGS, *map(str, SOURCES), "-o", str(binary)], capture_output=True)
    assert built.returncode == 0, f"{' '.join(command)} failed:\n{built.stderr.decode()}"
    ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=700)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert "ok   scalar       mxfp4" in ran.stdout
    assert " 0 failed" in ran.stdout.splitlines()[-1]
