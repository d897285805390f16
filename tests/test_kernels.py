"""The kernels of every tier without torch: the kernel matrix (tests/cpp/kernel_matrix.cpp), natively and emulated."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import pytest
from kernel_build import TIERS, X86_TIERS, Objects, check, has_simde
from test_system import compiler, supports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX only"),
]

X86 = platform.machine() in ("x86_64", "AMD64")
ARM = platform.machine() in ("aarch64", "arm64")
NATIVE = (*(X86_TIERS if X86 else ("neon",) if ARM else ()), "scalar")  # of which a CPU may lack some


def test_kernel_matrix(kernel_objects: Objects) -> None:
    """Every tier of this CPU."""
    check(kernel_objects.program(compiler()), tiers=NATIVE)


def test_every_tier_is_tested_somewhere() -> None:
    assert {*X86_TIERS, "neon", "scalar"} == set(TIERS), "a tier for another machine needs a test here"


@pytest.mark.skipif(not X86, reason="the x86 tiers are left out of builds for other machines")
def test_kernel_matrix_without_the_instructions(kernel_objects: Objects) -> None:
    """All of it on every x86 tier, in portable code: their logic on any CPU, if not their machine code."""
    if not has_simde(compiler()):
        pytest.skip("needs SIMDe's headers (libsimde-dev)")
    check(kernel_objects.program(compiler(), emulated=True), tiers=X86_TIERS, emulator="SIMDe")


# With -O1 and more the compilers take minutes for the checks in these unrolled loops. GCC checks the kernels alone, and
# takes the files of the matrix as test_kernel_matrix has them; clang checks everything.
CHECKED = "-fno-sanitize-recover=all"
SANITIZERS = {
    "g++": {"flags": ("-O0", "-fsanitize=address,undefined", CHECKED), "test_flags": ()},
    "clang++": {
        "flags": ("-O0", "-fsanitize=undefined", CHECKED),
        "test_flags": ("-O1", "-fsanitize=undefined", CHECKED),
    },
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_kernel_matrix_under_sanitizers(name: str, kernel_objects: Objects, tmp_path: Path) -> None:
    options = SANITIZERS[name]
    if not shutil.which(name) or not supports([name], list(options["flags"]), tmp_path):
        pytest.skip(f"needs {name} and its sanitizers")
    check(kernel_objects.program([name], link=options["flags"], **options), "--quick", tiers=NATIVE)


CROSS, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.skipif(ARM, reason="test_kernel_matrix runs it natively here")
@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"needs {CROSS} and {QEMU}")
def test_kernel_matrix_on_an_emulated_aarch64(kernel_objects: Objects) -> None:
    """The machine code of the NEON tier, run by qemu."""
    binary = kernel_objects.program([CROSS], link=("-static",))
    check(binary, "--quick", "--emulator", "qemu", tiers=("neon", "scalar"), emulator="qemu", runner=(QEMU,))
