"""csrc/system (pool, topology, affinity, cgroups): builds and runs its C++ test program, which needs no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread"]
BUILDS = {
    "plain": ["-O2"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "address-undefined": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def compiler() -> list[str]:
    """$CXX (which may hold flags), else the first compiler found; skips the test without one."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    pytest.skip("no C++ compiler")


def supports(command: list[str], flags: list[str], work: Path) -> bool:
    """Whether a trivial program with `flags` builds and runs (sanitizers are an optional part of a compiler; some fail
    at start on kernels whose address-space layout they do not know)."""
    source, binary = work / "probe.cpp", work / "probe"
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run([*command, *flags, str(source), "-o", str(binary)], capture_output=True)
    return built.returncode == 0 and subprocess.run([str(binary)], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
@pytest.mark.parametrize("build", BUILDS)
def test_system(build: str, tmp_path: Path) -> None:
    command, flags = compiler(), BUILDS[build]
    if build != "plain" and not supports(command, flags, tmp_path):
        pytest.skip(f"{command[0]} has no working {' '.join(flags)}")
    binary = tmp_path / "system_test"
    sources = [*sorted((ROOT / "tests/cpp").glob("system_*.cpp")), *sorted((ROOT / "csrc/system").glob("*.cpp"))]
    built = subprocess.run(
        [*command, *FLAGS, *flags, *map(str, sources), "-o", str(binary)], capture_output=True, text=True
    )
    assert built.returncode == 0, f"{' '.join(command)} failed:\n{built.stderr}"

    environment = {name: value for name, value in os.environ.items() if name != "CPU_MOE_THREADS"}
    ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=700, env=environment)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert "ok oversubscription" in ran.stdout  # the last one: all were run
