"""Builds the kernel matrix (tests/cpp/kernel_*.cpp), the torch-free test of the kernels."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test_system import ROOT

from torch_cpu_moe import _build

SOURCES = [
    *sorted((ROOT / "tests/cpp").glob("kernel_*.cpp")),
    *sorted((ROOT / "csrc/formats").glob("*.cpp")),
    ROOT / "csrc/simd/tier.cpp",
]


def build(compiler: list[str], folder: Path, link: tuple[str, ...] = ()) -> Path:
    """The binary, made in `folder` with the package's own flags, so that what is tested is what ships; two compilers at
    a time. `link` is for the linker alone."""

    def run(*arguments: str | Path) -> None:
        command = [*compiler, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr}"

    objects = {source: folder / f"{source.stem}.o" for source in SOURCES}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda unit: run(*_build.CFLAGS, "-c", unit[0], "-o", unit[1]), objects.items()))
    binary = folder / "kernel_matrix"
    run(*_build.CFLAGS, *link, *objects.values(), "-o", binary)
    return binary


def check(binary: Path, *arguments: str, runner: tuple[str, ...] = (), tiers: tuple[str, ...] = ("scalar",)) -> None:
    """Runs the matrix and requires that the tiers were tested and nothing failed."""
    ran = subprocess.run([*runner, str(binary), *arguments], capture_output=True, text=True, timeout=700)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    lines = ran.stdout.splitlines()
    for tier in tiers:
        assert any(line.split()[:3] == ["ok", tier, "mxfp4"] for line in lines), (tier, ran.stdout)
    assert " 0 failed" in lines[-1]
