"""Builds the C++ library from csrc/, once for each state of everything that shapes it.

The cache holds one directory per build, named by a digest of the sources and headers, the flags, torch (version,
commit, ABI), the machine and the compiler; a finished directory is never changed. A build runs in a directory of its
own and is renamed into place when the library has been loaded, so a killed builder, a full disk or a file system
without locks can leave rubbish behind but no broken library and no lock that anybody waits for. The `flock` on top
only spares concurrent importers from building the same thing twice.

torch is imported inside functions: setup.py uses this module to build ahead of time, and must not need torch otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import _host

NAME = "cpu_moe"
SUFFIXES = {".cpp", ".h", ".hpp", ".inc"}
# One flag set for every tier: a tier's instructions come from a target pragma in its own translation unit. So never
# -march=native (the cache may live in a shared home or an image), and never -ffast-math (NaN must stay NaN). Nor
# contraction: whether a product and a sum fuse would differ between the copies of one loop, and so would the bits.
CFLAGS = (
    "-O3",
    "-DNDEBUG",
    "-std=c++20",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-pthread",
)
WARNINGS = ("-Wall", "-Wextra")
# --as-needed drops libtorch_python, which cpp_extension adds: the library then depends on no Python version.
LDFLAGS = ("-pthread", "-Wl,--as-needed", "-ldl") if sys.platform.startswith("linux") else ("-pthread",)
# The torch headers make a compiler take up to 1.3 GB.
BYTES_PER_JOB = 1536 << 20
# Longer than a build takes anywhere (15 minutes is an emulated single core).
LOCK_TIMEOUT_S = 900.0
LOCK_POLL_S = 0.1
STALE_S = 4 * LOCK_TIMEOUT_S


class BuildError(ImportError):
    """The C++ library can neither be found nor built; the message says what to do."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything but the compiler that decides whether a library fits: equal fingerprints, equal behaviour."""

    source: str  # digest of the files below csrc and of the flags
    torch: str  # version, commit and C++ ABI
    machine: str  # e.g. x86_64

    def digest(self) -> str:
        return hashlib.sha256("\n".join((self.source, self.torch, self.machine)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Compiler:
    command: str
    version: str  # first line of --version


def say(message: str) -> None:
    print(f"torch_cpu_moe: {message}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- what to build


def source_directory() -> Path:
    """csrc/ of this installation: inside the package when installed, beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "csrc", package.parent / "csrc"):
        if (directory / "library.cpp").is_file():
            return directory
    raise BuildError(
        f"the C++ sources are missing: neither {package / 'csrc'} nor {package.parent / 'csrc'} has library.cpp; "
        "reinstall torch-cpu-moe"
    )


def _files(csrc: Path) -> list[Path]:
    """Sources and headers, in a fixed order. csrc/cuda is a library of its own, built where there is a CUDA device."""
    files = (path for path in csrc.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path for path in files if path.relative_to(csrc).parts[0] != "cuda")


def sources(csrc: Path) -> list[Path]:
    """The translation units below `csrc`. ninja's objects lie in one folder, so their names must differ."""
    units = [path for path in _files(csrc) if path.suffix == ".cpp"]
    seen: dict[str, Path] = {}
    for unit in units:
        other = seen.setdefault(unit.stem, unit)
        if other != unit:
            raise BuildError(f"two sources would make one object file: {other} and {unit}; rename one")
    return units


def fingerprint(csrc: Path) -> Fingerprint:
    import torch

    digest = hashlib.sha256(" ".join((*CFLAGS, *LDFLAGS)).encode())
    for path in _files(csrc):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(csrc).as_posix()} {len(content)}\n".encode() + content)
    commit = str(torch.version.git_version or "")[:12]
    abi = int(torch.compiled_with_cxx11_abi())
    return Fingerprint(digest.hexdigest(), f"{torch.__version__} {commit} abi{abi}", platform.machine())


def find_compiler() -> Compiler:
    """The compiler that torch's cpp_extension will call: $CXX, or c++."""
    command = os.environ.get("CXX") or "c++"
    advice = (
        "Building torch_cpu_moe needs a C++20 compiler. Install one (for example: apt install g++, dnf install "
        "gcc-c++, conda install gxx), or name it in CXX, or install a library built elsewhere for the same torch: "
        "CPU_MOE_AOT=1 pip install --no-build-isolation . (see README)"
    )
    program = shlex.split(command)
    if not program or shutil.which(program[0]) is None:
        raise BuildError(f"no C++ compiler: {command!r} is not on PATH. {advice}")
    try:
        result = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command!r} does not run: {error}. {advice}") from error
    if result.returncode:
        raise BuildError(
            f"the C++ compiler {command!r} does not run: "
            f"{result.stderr.strip() or f'exit status {result.returncode}'}. {advice}"
        )
    return Compiler(command, (result.stdout.strip().splitlines() or ["unknown version"])[0])


def _ninja_directory() -> str | None:
    """Where ninja is when PATH does not say: the package's own folder, as in `venv/bin/python` without activation."""
    if shutil.which("ninja"):
        return None
    beside = Path(sys.executable).parent
    if (beside / "ninja").is_file():
        return str(beside)
    with contextlib.suppress(ImportError, AttributeError):
        return str(importlib.import_module("ninja").BIN_DIR)
    raise BuildError("building torch_cpu_moe needs ninja, which is neither on PATH nor installed: pip install ninja")


def jobs() -> int:
    """Compilers to run at once: $MAX_JOBS, else as many as there are CPUs and memory for."""
    given = os.environ.get("MAX_JOBS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    sizes = _host.memory()
    free = min(size for size in (sizes["available_bytes"], sizes["limit_bytes"], 1 << 62) if size is not None)
    return max(1, min(_host.usable_cpus(), free // BYTES_PER_JOB))


# ------------------------------------------------------------------------------------------------------- compiling


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _explain(output: str) -> str:
    """The part of a compiler's output that a person needs: from the first error on, else the end."""
    lines = output.strip().splitlines()
    wanted = re.compile(r"\b(fatal )?error\b|undefined reference|\bKilled\b|No space left|cannot allocate|ninja: fatal")
    # ninja -v repeats each command, and "-Werror" in it is no error.
    first = next((i for i, line in enumerate(lines) if wanted.search(line) and " -c " not in line), None)
    part = lines[max(0, first - 1) : first + 24] if first is not None else lines[-25:]
    hint = ""
    if re.search(r"\bKilled\b|cannot allocate|Out of memory", output, re.IGNORECASE):
        hint = "\nThe compiler seems to have run out of memory: try again with MAX_JOBS=1."
    return "\n".join(f"  {line[:400]}" for line in part) + hint


def compile_library(csrc: Path, directory: Path, log: Path) -> Path:
    """Compile and link everything in `directory`, load the result into this process, and return its path.

    On failure the whole output goes to `log`, and BuildError carries the telling part of it.
    """
    from torch.utils import cpp_extension

    environment = {"MAX_JOBS": str(jobs())}
    ninja = _ninja_directory()
    if ninja is not None:
        environment["PATH"] = os.pathsep.join((ninja, os.environ.get("PATH", os.defpath)))
    try:
        with _environment(environment):
            cpp_extension.load(
                name=NAME,
                sources=[str(path) for path in sources(csrc)],
                extra_cflags=[*CFLAGS, *WARNINGS],
                extra_ldflags=list(LDFLAGS),
                extra_include_paths=[str(csrc)],
                build_directory=str(directory),
                with_cuda=False,
                is_python_module=False,
            )
    except BuildError:
        raise
    except Exception as error:  # ninja's failure is a RuntimeError, a library that does not load an OSError, ...
        output = str(error)
        where = ""
        with contextlib.suppress(OSError):
            log.write_text(output + "\n")
            where = f"\nThe full output is in {log}"
        raise BuildError(f"building the C++ library failed:\n{_explain(output)}{where}") from error
    # cpp_extension adds _v1, _v2, ... to the name when a process builds more than once.
    return next(directory.glob("*.so"))


def _clean(directory: Path) -> None:
    """Leave the library alone in its directory."""
    for path in directory.iterdir():
        if path.suffix != ".so" and path.is_file():
            path.unlink()


# ------------------------------------------------------------------------------------------------------- the cache


def cache_root() -> Path:
    """$CPU_MOE_BUILD_DIR, else torch_cpu_moe in the user's cache folder."""
    given = os.environ.get("CPU_MOE_BUILD_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache").absolute() / "torch_cpu_moe"


def record(directory: Path, library: Path, mark: Fingerprint, compiler: str, seconds: float | None) -> None:
    """Write build.json beside a finished library: the proof that it is whole and what it fits."""
    facts = {
        "library": library.name,
        "bytes": library.stat().st_size,
        **asdict(mark),
        "compiler": compiler,
        "seconds": seconds and round(seconds, 1),
    }
    (directory / "build.json").write_text(json.dumps(facts, indent=1) + "\n")


def read_record(directory: Path) -> dict[str, object] | None:
    """build.json of a directory whose library is there in full length, else None."""
    try:
        facts = json.loads((directory / "build.json").read_text())
        whole = (directory / facts["library"]).stat().st_size == facts["bytes"]
        return dict(facts) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Slot:
    """One build's place in the cache."""

    root: Path
    key: str  # name of the finished directory

    @property
    def directory(self) -> Path:
        return self.root / self.key

    @property
    def lock(self) -> Path:
        return self.root / f"{self.key}.lock"

    @property
    def log(self) -> Path:
        return self.root / f"{self.key}.log"

    def library(self) -> Path | None:
        facts = read_record(self.directory)
        return self.directory / str(facts["library"]) if facts else None


def _key(mark: Fingerprint, compiler: str) -> str:
    version = mark.torch.split()[0]
    return f"torch{version}-{mark.machine}-{mark.digest()}-{compiler}"


def slot(mark: Fingerprint, compiler: Compiler) -> Slot:
    return Slot(cache_root(), _key(mark, hashlib.sha256(repr(compiler).encode()).hexdigest()[:8]))


def cached_without_compiler(mark: Fingerprint) -> Path | None:
    """A finished build by whatever compiler: an image may carry the cache but no compiler."""
    for directory in sorted(cache_root().glob(_key(mark, "*"))):
        facts = read_record(directory)
        if facts:
            return directory / str(facts["library"])
    return None


def build(csrc: Path, mark: Fingerprint, compiler: Compiler) -> tuple[Path, float | None]:
    """The library for `mark`, built if the cache lacks it: its path, and the seconds it took (None: was there).

    A library built here is loaded into the process already; one from the cache is not.
    """
    place = slot(mark, compiler)
    found = place.library()
    if found:
        return found, None  # before anything is written: a read-only cache is fine
    try:
        place.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(place.root, error) from error
    with _locked(place):
        found = place.library()
        if found:
            return found, None
        staging = _staging(place)
        try:
            version = mark.torch.split()[0]
            say(f"building the C++ library for torch {version} with {compiler.version}, {jobs()} compilers at a time")
            start = time.monotonic()
            library = compile_library(csrc, staging, place.log)
            seconds = time.monotonic() - start
            _clean(staging)
            record(staging, library, mark, compiler.version, seconds)
            # mkdtemp shuts everybody else out; a cache that others may read (an image's, a group's) stays readable.
            staging.chmod(place.root.stat().st_mode & 0o777)
            _publish(staging, place)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    say(f"built in {seconds:.1f} s: {place.directory}")
    return place.directory / library.name, seconds


def _staging(place: Slot) -> Path:
    """A new folder to build in; those that killed builders left are removed when no build can be alive in them."""
    try:
        for stale in place.root.glob("*.tmp-*"):
            if time.time() - stale.stat().st_mtime > STALE_S:
                shutil.rmtree(stale, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{place.key}.tmp-", dir=place.root))
    except OSError as error:
        raise _unwritable(place.root, error) from error


def _unwritable(root: Path, error: OSError) -> BuildError:
    return BuildError(
        f"cannot write to the build cache {root} ({error.strerror}): set CPU_MOE_BUILD_DIR to a folder that this user "
        "can write to"
    )


def _publish(staging: Path, place: Slot) -> None:
    for attempt in range(2):
        try:
            staging.rename(place.directory)
            place.log.unlink(missing_ok=True)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or attempt:
                raise BuildError(f"cannot store the library in {place.directory}: {error.strerror}") from error
            # Either a builder that took no lock was first, and its library is as good; or a damaged one is in the way.
            if place.library():
                return
            shutil.rmtree(place.directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(place: Slot) -> Iterator[None]:
    """Hold the build's lock file if that is possible; where it is not, two builders may do the same work, no more."""
    try:
        descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield  # an unwritable cache: the staging folder cannot be made either, and says so
        return
    try:
        if _wait_for_lock(descriptor, place):
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)  # releases the lock; the file stays, since removing it would race with a waiter


def _wait_for_lock(descriptor: int, place: Slot) -> bool:
    """Whether the lock is held now: not so if locks do not work here, it took too long, or the library has appeared."""
    start = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                return False  # a file system without locks
        if place.library():
            return False
        waited = time.monotonic() - start
        if waited >= LOCK_TIMEOUT_S:
            say(f"process {_host.read(place.lock)} has held {place.lock} for {waited:.0f} s: building without waiting")
            return False
        if waited >= 1.0 and not told:
            told = True
            say(f"waiting for process {_host.read(place.lock)}, which builds the library (lock file {place.lock})")
        time.sleep(LOCK_POLL_S)
