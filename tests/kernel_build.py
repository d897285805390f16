"""Builds the torch-free tests of the kernels: a program of tests/cpp/kernel_*.cpp with csrc/formats and csrc/simd."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test_system import ROOT

from torch_cpu_moe import _build

FUZZER = [ROOT / f"tests/cpp/kernel_{part}.cpp" for part in ("fuzz", "dot", "report")]
PROGRAMS = {
    "kernel_matrix": sorted({*(ROOT / "tests/cpp").glob("kernel_*.cpp")} - {FUZZER[0]}),
    "kernel_fuzz": FUZZER,
}
CHOICE = ROOT / "csrc/simd/tier.cpp"
KERNELS = [*sorted((ROOT / "csrc/formats").glob("*.cpp")), CHOICE]
# Every tier of the sources, whatever machine it is for.
TIERS = {path.stem.removeprefix("kernels_").replace("_", "-"): path for path in KERNELS if "kernels_" in path.stem}
X86_TIERS = tuple(tier for tier in TIERS if tier.startswith("avx"))

# tests/cpp/emulated has an immintrin.h of portable code. -O1: the compilers take half the time of -O2 for a program
# half as fast, which is the shorter way in all.
EMULATED = ("-DCPU_MOE_EMULATED", f"-I{ROOT / 'tests/cpp/emulated'}", "-O1", "-Wno-psabi")
# What the macro and the header change; all else is the same code.
EMULATED_SOURCES = {*(TIERS[tier] for tier in X86_TIERS), CHOICE, ROOT / "tests/cpp/kernel_report.cpp"}


class Objects:
    """Object files in `folder`, each made once whatever wants it, two compilers at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, command: tuple[str, ...], source: Path) -> Path:
        digest = hashlib.sha256(" ".join((*command, str(source))).encode()).hexdigest()[:12]
        target = self.folder / f"{source.stem}-{digest}.o"
        if not target.exists():
            run(*command, "-c", source, "-o", target)
        return target

    def kernels(self, compiler: list[str], flags: tuple[str, ...] = (), emulated: bool = False) -> dict[Path, Path]:
        """The objects of csrc by source, made with the package's own flags and then `flags`, so that what is tested is
        what ships. `emulated`: the x86 tiers for a CPU without their instructions."""
        return self._compile(compiler, flags, emulated, KERNELS)

    def program(
        self,
        compiler: list[str],
        name: str = "kernel_matrix",
        flags: tuple[str, ...] = (),
        test_flags: tuple[str, ...] = (),
        link: tuple[str, ...] = (),
        emulated: bool = False,
    ) -> Path:
        """One of PROGRAMS with kernels() of these flags; `test_flags` are for the files of the program itself, `link`
        for the linker alone."""
        objects = {
            **self._compile(compiler, test_flags, emulated, PROGRAMS[name]),
            **self.kernels(compiler, flags, emulated),
        }
        digest = hashlib.sha256(" ".join(map(str, (*link, *objects.values()))).encode()).hexdigest()[:12]
        binary = self.folder / f"{name}-{digest}"
        if not binary.exists():
            run(*compiler, *_build.CFLAGS, *flags, *link, *objects.values(), "-o", binary)
        return binary

    def _compile(
        self, compiler: list[str], flags: tuple[str, ...], emulated: bool, sources: list[Path]
    ) -> dict[Path, Path]:
        def command(source: Path) -> tuple[str, ...]:
            extra = EMULATED if emulated and source in EMULATED_SOURCES else ()
            return (*compiler, *_build.CFLAGS, *flags, *extra)

        with ThreadPoolExecutor(min(2, _build.jobs())) as pool:
            return dict(
                zip(sources, pool.map(lambda source: self.compile(command(source), source), sources), strict=True)
            )


def has_simde(compiler: list[str]) -> bool:
    include = "#include <simde/x86/avx512.h>\n"
    probe = subprocess.run([*compiler, "-E", "-x", "c++", "-"], input=include, capture_output=True, text=True)
    return probe.returncode == 0


def run(*arguments: str | Path) -> None:
    command = [*map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr}"


def check(
    binary: Path, *arguments: str, tiers: tuple[str, ...], emulator: str = "", runner: tuple[str, ...] = ()
) -> None:
    """Runs the matrix and requires that nothing failed, that each of `tiers` was tested or, unless it is emulated, that
    this CPU lacks it, and that the output tells what was emulated."""
    ran = subprocess.run([*runner, str(binary), *arguments], capture_output=True, text=True, timeout=700)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    print(ran.stdout)  # pytest -rP shows it
    lines = ran.stdout.splitlines()
    for tier in tiers:
        if not emulator and f"not run: {tier} (not supported by this CPU)" in lines:
            continue
        line = next((line for line in lines if line.split()[:3] == ["ok", tier, "mxfp4"]), "")
        assert line, f"{tier} was not tested\n{ran.stdout}"
        assert ("emulated" in line) == (f"emulated by {emulator}" in line) == bool(emulator), line
    assert " 0 failed" in lines[-1] and ("emulated" in lines[-1]) == bool(emulator), lines[-1]
