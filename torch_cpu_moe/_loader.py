"""Finds the C++ library that fits this torch and this source, builds it if there is none, and loads it once.

In this order: operators that the process already has (loading a second copy would abort it), a library built ahead
of time into the package, the build cache, a new build.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _build, _fake
from ._build import BuildError

AOT_DIRECTORY = Path(__file__).resolve().parent / "_aot"

_lock = threading.Lock()
_library: Library | None = None


@dataclass(frozen=True)
class Library:
    """The library in use.

    Attributes:
        path: its file, or None where the process had the operators before this package was imported.
        kind: "aot" (built into the installed package), "jit" (built here, or cached), "process".
        reason: why this one, in words.
        torch: the torch it was built for; None for "process".
        compiler: what built it; None if unknown.
        source: digest of the C++ sources and flags; None for "process".
        build_seconds: how long the build took in this process; None if it was there already.
    """

    path: str | None
    kind: str
    reason: str
    torch: str | None = None
    compiler: str | None = None
    source: str | None = None
    build_seconds: float | None = None


def started_as_command() -> bool:
    """Whether Python is on its way to run `python -m torch_cpu_moe` (or the script of that name).

    Its commands load the library themselves: `doctor` must be able to explain why it does not load, so the import
    before it must not raise. While Python locates a module to run, sys.argv[0] is "-m".
    """
    if sys.argv[:1] == ["-m"]:
        return "torch_cpu_moe" in sys.orig_argv
    return bool(sys.argv) and Path(sys.argv[0]).name == "torch-cpu-moe"


def has_operators() -> bool:
    """Whether the process has cpu_moe's operators, from whatever library."""
    return hasattr(torch.ops.cpu_moe, "experts")


def loaded() -> Library | None:
    """The library in use, or None before `load`."""
    return _library


def load() -> Library:
    """Load the library and register the fake kernels; does nothing when that was done before.

    Raises:
        BuildError: there is no fitting library and none can be built; the message says what to do.
    """
    global _library
    with _lock:
        if _library is None:
            _library = _find_and_load()
            _fake.register()
        return _library


def _find_and_load() -> Library:
    if has_operators():
        return Library(None, "process", "the process had the operators before torch_cpu_moe was imported")
    csrc = _build.source_directory()
    mark = _build.fingerprint(csrc)

    library, why_not = _ahead_of_time(mark)
    if library is not None:
        return library

    try:
        compiler = _build.find_compiler()
    except BuildError:
        cached = _build.cached_without_compiler(mark)
        if cached is None:
            raise
        _open(cached)
        reason = f"{why_not}; found in the build cache (there is no compiler here)"
        return Library(str(cached), "jit", reason, mark.torch, None, mark.source)

    path, seconds = _build.build(csrc, mark, compiler)
    how = "found in the build cache" if seconds is None else "built now"
    if not has_operators():
        try:
            _open(path)
        except OSError as error:
            # A damaged file has the right length: build it again rather than fail for ever.
            _build.say(f"{path} does not load ({error}): building it again")
            (path.parent / "build.json").unlink(missing_ok=True)
            path, seconds = _build.build(csrc, mark, compiler)
            how = "built now in place of one that did not load"
    if not has_operators():
        raise BuildError(f"{path} loads but registers no operators: remove {path.parent} and import again")
    return Library(str(path), "jit", f"{why_not}; {how}", mark.torch, compiler.version, mark.source, seconds)


def _ahead_of_time(mark: _build.Fingerprint) -> tuple[Library | None, str]:
    """The library in the package if it fits, else None and why not."""
    facts = _build.read_record(AOT_DIRECTORY)
    if facts is None:
        return None, "the package has no library built ahead of time"
    for name, wanted in (("torch", mark.torch), ("machine", mark.machine), ("source", mark.source)):
        if facts.get(name) != wanted:
            found = facts.get(name)
            detail = "from other sources" if name == "source" else f"for {name} {found}, and this is {wanted}"
            return None, f"the library in the package was built {detail}"
    path = AOT_DIRECTORY / str(facts["library"])
    try:
        _open(path)
    except OSError as error:
        return None, f"the library in the package does not load ({error})"
    reason = "built ahead of time for this torch and this source"
    return Library(str(path), "aot", reason, mark.torch, str(facts.get("compiler")), mark.source), ""


def _open(path: Path) -> None:
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
