"""The kernels of every tier without torch: the kernel matrix (tests/cpp/kernel_matrix.cpp), natively and emulated."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
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
# takes the files of the matrix as test_kernel_matrix has them; clang checks everything, and counts for libFuzzer.
CHECKED = "-fno-sanitize-recover=all"
SANITIZERS = {
    "g++": {"flags": ("-O0", "-fsanitize=address,undefined", CHECKED), "test_flags": ()},
    "clang++": {
        "flags": ("-O0", "-fsanitize=undefined,fuzzer-no-link", CHECKED),
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


# --------------------------------------------------------------------------------------------------------------- fuzzer


def fuzz(binary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binary), *arguments], capture_output=True, text=True, timeout=700)


def test_random_inputs(kernel_objects: Objects) -> None:
    """tests/cpp/kernel_fuzz.cpp on inputs of its own: the same in every run, and each one can be run again alone."""
    ran = fuzz(kernel_objects.program(compiler(), "kernel_fuzz"), "--runs", "30000")
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert "kernel fuzzer: 30000 inputs, 0 failed" in ran.stdout


def test_random_inputs_find_a_wrong_tier(kernel_objects: Objects) -> None:
    """In every format, with its seed, and no other tier is blamed."""
    ran = fuzz(kernel_objects.program(compiler(), "kernel_fuzz"), "--runs", "300", "--broken")
    assert ran.returncode == 1, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    failed = [line.split() for line in ran.stdout.splitlines() if line.startswith("FAIL")]
    assert {words[1] for words in failed} == {"broken", "--runs"}
    formats = ("bf16", "f16", "f32", "mxfp4", "nvfp4", "ds_fp4", "fp8_block", "fp8_block-bf16", "q4_0")
    assert {words[2] for words in failed if words[1] == "broken"} == set(formats)
    again = next(words for words in failed if words[1] == "--runs")
    ran = fuzz(kernel_objects.program(compiler(), "kernel_fuzz"), *again[1:], "--broken")
    assert ran.returncode == 1 and "1 inputs, 1 failed" in ran.stdout


def test_libfuzzer(kernel_objects: Objects, tmp_path: Path) -> None:
    """The same as a libFuzzer target: it builds, is led by the kernels' branches, and finds nothing in a few seconds.
    (CONTRIBUTING.md has the command for a long run.)"""
    link = ("-fsanitize=undefined,fuzzer", CHECKED)
    if not shutil.which("clang++"):
        pytest.skip("needs clang++")
    target = "#include <cstddef>\n#include <cstdint>\nextern "
    target += '"C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
    if not builds("clang++", target, link, tmp_path):
        pytest.skip("needs clang's libFuzzer")
    options = SANITIZERS["clang++"]
    binary = kernel_objects.program(
        ["clang++"],
        "kernel_fuzz",
        flags=options["flags"],
        test_flags=(*options["test_flags"], "-DCPU_MOE_LIBFUZZER"),
        link=link,
    )
    ran = fuzz(binary, "-seed=1", "-runs=500", "-max_len=600", "-len_control=0", f"-artifact_prefix={tmp_path}/")
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert "Done 500 runs" in ran.stderr
    assert max(map(int, re.findall(r" cov: (\d+) ", ran.stderr))) > 2000, ran.stderr


def builds(compiler: str, code: str, flags: tuple[str, ...], folder: Path) -> bool:
    command = [compiler, *flags, "-x", "c++", "-", "-o", str(folder / "probe")]
    return subprocess.run(command, input=code, capture_output=True, text=True).returncode == 0
