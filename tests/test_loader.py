"""Finding, building and loading the library (cases JIT-01, JIT-03, ISA-03).

A copy of the package with a stand-in csrc/ is imported in fresh processes. It is compiled for real once; otherwise the
"compiler" is a script that hands out that library, fails, or sleeps, as FAKE_... variables tell it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_cpu_moe
from torch_cpu_moe import _build, _loader

LIBRARY = """
#include <torch/library.h>

#include "sub/value.h"
TORCH_LIBRARY(cpu_moe, m) {
  m.def(
      "experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor[] gate_up, Tensor[] down, str format, *, "
      "str? down_format=None) -> Tensor");
  m.def("experts_out(Tensor hidden, Tensor(a!) out) -> ()");
  m.def("dequantize(Tensor[] weight, str format, *, ScalarType dtype) -> Tensor");
  m.def("quantize(Tensor weight, str format) -> Tensor[]");
  m.def("get_num_threads() -> int", []() -> int64_t { return VALUE; });
}
"""

COMPILER = """#!/bin/sh
case "$1" in
  --version) echo "fake-g++ ${FAKE_VERSION:-1}"; exit ;;
  -dumpfullversion) echo 12.2.0; exit ;;
esac
step=link
for argument; do
  [ "$previous" = -o ] && out=$argument
  [ "$argument" = -c ] && step=compile
  previous=$argument
done
echo "$step $*" >> "$FAKE_LOG"
[ "$FAKE_SLEEP" = $step ] && sleep 30
[ "$FAKE_FAIL" = $step ] && { echo "csrc/library.cpp:7:1: error: expected a semicolon"; exit 1; }
if [ $step = link ]; then cp "$FAKE_LIBRARY" "$out"; else echo object > "$out"; fi
"""

SHOW = "import json, torch_cpu_moe; print(json.dumps(torch_cpu_moe.build_info()))"
# A library that is asked to load only later, so that a test can change the loader first.
LATER = "import sys; sys.argv = ['torch-cpu-moe']; import torch_cpu_moe; from torch_cpu_moe import _build, _loader\n"


def copy_package(root: Path) -> None:
    """The package in `root` with the stand-in for csrc/."""
    package = Path(torch_cpu_moe.__file__).parent
    shutil.copytree(
        package, root / "torch_cpu_moe", ignore=shutil.ignore_patterns("csrc", "_aot", "__pycache__", "bench")
    )
    (root / "csrc" / "sub").mkdir(parents=True)
    (root / "csrc" / "library.cpp").write_text(LIBRARY)
    (root / "csrc" / "sub" / "value.h").write_text("#define VALUE 2\n")
    (root / "csrc" / "sub" / "other.cpp").write_text("int other() { return 1; }\n")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled."""
    root = tmp_path_factory.mktemp("real")
    copy_package(root)
    environment = {**os.environ, "CPU_MOE_BUILD_DIR": str(root / "a cache")}  # a space in the path, too
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([sys.executable, "-c", SHOW], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "built in" in done.stderr
    info = json.loads(done.stdout)
    assert info["build_seconds"] > 0
    assert Path(info["path"]).is_relative_to(root / "a cache")
    return Path(info["path"])


class Sandbox:
    """A package, a cache and a compiler of a test's own."""

    def __init__(self, root: Path, library: Path) -> None:
        copy_package(root)
        self.root, self.cache, self.log = root, root / "cache", root / "compiler.log"
        compiler = root / "fake-g++"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        self.environment = {
            **os.environ,
            "CPU_MOE_BUILD_DIR": str(self.cache),
            "CXX": str(compiler),
            "FAKE_LOG": str(self.log),
            "FAKE_LIBRARY": str(library),
            "TORCH_NO_COMPILER_WRAPPER": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("PYTHONPATH", "MAX_JOBS"):
            self.environment.pop(name, None)

    def start(self, code: str = SHOW, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=self.root,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, code: str = SHOW, *, ok: bool = True, **environment: str) -> tuple[dict, str]:
        """Run to the end, within the watchdog's time; returns build_info (or {}) and what stderr got."""
        process = self.start(code, **environment)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert (process.returncode == 0) == ok, err
        return (json.loads(out) if ok and out.strip() else {}), err

    def calls(self, step: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(step)]

    def wait_for(self, step: str) -> None:
        deadline = time.monotonic() + 60
        while not self.calls(step):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def edit(self, name: str, text: str) -> None:
        (self.root / "csrc" / name).write_text(text)


@pytest.fixture
def sandbox(tmp_path: Path, library: Path) -> Iterator[Sandbox]:
    return Sandbox(tmp_path, library)


# ---------- building and caching


def test_builds_once_and_says_so(sandbox: Sandbox) -> None:
    info, err = sandbox.run()
    assert info["kind"] == "jit"
    assert "built now" in info["reason"]
    lines = [line for line in err.splitlines() if line.startswith("torch_cpu_moe: ")]
    assert len(lines) == 2
    assert "building the C++ library" in lines[0]
    assert "built in" in lines[1]
    assert len(sandbox.calls("compile")) == 2
    info, err = sandbox.run()
    assert "found in the build cache" in info["reason"]
    assert err == ""
    assert len(sandbox.calls("compile")) == 2
    assert sorted(path.name for path in Path(info["path"]).parent.iterdir()) == ["build.json", "cpu_moe.so"]
    assert Path(info["path"]).parent.stat().st_mode == sandbox.cache.stat().st_mode  # others may use it as well


def test_flags_are_portable_and_keep_nan(sandbox: Sandbox) -> None:
    sandbox.run()
    commands = "\n".join(sandbox.calls("compile"))
    assert " -O3 " in commands
    assert "-std=c++20" in commands
    for forbidden in ("-march", "-mtune", "-mavx", "-ffast-math", "-Ofast", "-ffinite-math-only"):
        assert forbidden not in commands


def test_header_change_alone_builds_again(sandbox: Sandbox) -> None:
    first, _ = sandbox.run()
    sandbox.edit("sub/value.h", "#define VALUE 3\n")
    second, _ = sandbox.run()
    assert first["path"] != second["path"]
    assert len(sandbox.calls("link")) == 2
    sandbox.edit("sub/value.h", "#define VALUE 2\n")  # the first is still there
    assert sandbox.run()[0]["path"] == first["path"]
    assert len(sandbox.calls("link")) == 2


def test_other_compiler_builds_again(sandbox: Sandbox) -> None:
    first, _ = sandbox.run()
    second, _ = sandbox.run(FAKE_VERSION="2")
    assert first["path"] != second["path"]


def test_fingerprint_covers_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_package(tmp_path)
    csrc = tmp_path / "csrc"
    digests = {_build.fingerprint(csrc).digest()}

    def changed() -> bool:
        before = len(digests)
        digests.add(_build.fingerprint(csrc).digest())
        return len(digests) == before + 1

    assert not changed()
    (csrc / "cuda").mkdir()
    (csrc / "cuda" / "gather.cpp").write_text("// a library of its own")
    assert not changed()
    (csrc / "sub" / "other.cpp").rename(csrc / "sub" / "another.cpp")
    assert changed()
    monkeypatch.setattr(_build, "CFLAGS", (*_build.CFLAGS, "-g"))
    assert changed()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert changed()
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    assert changed()
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
    assert changed()
    monkeypatch.setattr(_build.platform, "machine", lambda: "riscv64")
    assert changed()


def test_two_sources_of_one_name_are_refused(sandbox: Sandbox) -> None:
    sandbox.edit("other.cpp", "")
    assert "would make one object file" in sandbox.run(ok=False)[1]


def test_building_leaves_the_process_as_it_was(sandbox: Sandbox) -> None:
    code = """
import os, threading, torch
before = dict(os.environ), os.sched_getaffinity(0), torch.get_num_threads(), len(os.listdir("/proc/self/task"))
import torch_cpu_moe
after = dict(os.environ), os.sched_getaffinity(0), torch.get_num_threads(), len(os.listdir("/proc/self/task"))
assert torch_cpu_moe.build_info()["build_seconds"] is not None
assert before == after, (before, after)
"""
    sandbox.run(code)


def test_jobs_respect_the_variable_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build._host, "usable_cpus", lambda: 64)
    monkeypatch.setattr(
        _build._host, "memory", lambda: {"total_bytes": 1 << 40, "available_bytes": 1 << 38, "limit_bytes": 4 << 30}
    )
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert _build.jobs() == 2
    monkeypatch.setenv("MAX_JOBS", "7")
    assert _build.jobs() == 7
    monkeypatch.setenv("MAX_JOBS", "many")
    assert _build.jobs() == 2


# ---------- killed and concurrent


@pytest.mark.parametrize("step", ["compile", "link"])
def test_killed_builder_blocks_nobody(sandbox: Sandbox, step: str) -> None:
    builder = sandbox.start(FAKE_SLEEP=step)
    try:
        sandbox.wait_for(step)
        os.kill(builder.pid, signal.SIGKILL)  # ninja lives on, as it would in real life
        builder.wait()
        assert list(sandbox.cache.glob("*.tmp-*/lock"))  # torch's own lock, stale now
        info, _ = sandbox.run()
        assert "built now" in info["reason"]
    finally:
        os.killpg(builder.pid, signal.SIGKILL)
        builder.communicate()


def test_builder_killed_at_the_lock_blocks_nobody(sandbox: Sandbox) -> None:
    code = (
        LATER
        + "import os, signal\n_build.compile_library = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n_loader.load()"
    )
    sandbox.run(code, ok=False)
    assert "built now" in sandbox.run()[0]["reason"]


def test_stale_lock_of_torch_anywhere_in_the_cache(sandbox: Sandbox) -> None:
    first, _ = sandbox.run()
    directory = Path(first["path"]).parent
    (directory / "lock").touch()
    (directory / "build.json").unlink()  # now it looks like a build that was cut short
    (sandbox.cache / "lock").touch()
    assert "built now" in sandbox.run()[0]["reason"]


def test_two_importers_make_one_build(sandbox: Sandbox) -> None:
    processes = [sandbox.start() for _ in range(3)]
    reasons = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        reasons.append(json.loads(out)["reason"].split("; ")[1])
    assert sorted(reasons) == ["built now", "found in the build cache", "found in the build cache"]
    assert len(sandbox.calls("link")) == 1


def test_waiting_is_bounded_and_names_the_lock(sandbox: Sandbox) -> None:
    first, _ = sandbox.run()
    directory = Path(first["path"]).parent
    shutil.rmtree(directory)
    lock = directory.with_name(directory.name + ".lock")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate()
        file.write("4242")
        file.flush()
        _, err = sandbox.run(LATER + "_build.LOCK_TIMEOUT_S = 2.0\n_loader.load()")
    assert f"waiting for process 4242, which builds the library (lock file {lock})" in err
    assert "building without waiting" in err
    assert directory.exists()


def test_file_system_without_locks(sandbox: Sandbox) -> None:
    code = f"""{LATER}
def refuse(*_):
    raise OSError({errno.ENOLCK}, "No locks available")
_build.fcntl.flock = refuse
assert _loader.load().build_seconds is not None
"""
    sandbox.run(code)
    assert "found in the build cache" in sandbox.run()[0]["reason"]


# ---------- failures


def test_compiler_error_is_shown_and_poisons_nothing(sandbox: Sandbox) -> None:
    _, err = sandbox.run(ok=False, FAKE_FAIL="compile")
    assert "csrc/library.cpp:7:1: error: expected a semicolon" in err
    log = next(sandbox.cache.glob("*.log"))
    assert f"The full output is in {log}" in err
    assert "FAILED" in log.read_text()
    assert not list(sandbox.cache.glob("*.tmp-*"))
    assert "built now" in sandbox.run()[0]["reason"]
    assert not log.exists()


def test_failure_and_success_in_one_process(sandbox: Sandbox) -> None:
    code = f"""{LATER}
import os
for step in ("compile", "link"):
    os.environ["FAKE_FAIL"] = step
    try:
        _loader.load()
    except _build.BuildError as error:
        assert "expected a semicolon" in str(error)
    else:
        raise AssertionError
del os.environ["FAKE_FAIL"]
assert _loader.load().build_seconds is not None
"""
    sandbox.run(code)


def test_missing_compiler_is_one_clear_message(sandbox: Sandbox) -> None:
    _, err = sandbox.run(ok=False, CXX="no-such-compiler")
    assert "no C++ compiler: 'no-such-compiler' is not on PATH" in err.splitlines()[-1]
    assert "apt install g++" in err
    # With a finished build, no compiler is needed.
    sandbox.run()
    assert "there is no compiler here" in sandbox.run(CXX="no-such-compiler")[0]["reason"]


def test_compiler_that_does_not_run(sandbox: Sandbox) -> None:
    assert "does not run" in sandbox.run(ok=False, CXX="false")[1]


@pytest.mark.parametrize("place", ["a file/cache", "/proc/cpu_moe"])
def test_unwritable_cache_is_one_clear_message(sandbox: Sandbox, place: str) -> None:
    (sandbox.root / "a file").touch()
    cache = sandbox.root / place
    _, err = sandbox.run(ok=False, CPU_MOE_BUILD_DIR=str(cache))
    assert f"cannot write to the build cache {cache}" in err.splitlines()[-1]
    assert "set CPU_MOE_BUILD_DIR" in err


def test_missing_ninja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_build.shutil, "which", lambda _: None)
    monkeypatch.setattr(_build.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(_build.BuildError, match="pip install ninja"):
        _build._ninja_directory()
    (tmp_path / "ninja").touch()  # beside python, in a virtual environment that is not activated
    assert _build._ninja_directory() == str(tmp_path)


def test_explanation_starts_at_the_first_error() -> None:
    output = "\n".join(
        ["ninja: Entering directory", "[1/9] c++ -Werror -c a.cpp"]
        + [f"note {i}" for i in range(99)]
        + ["a.cpp:1:1: error: boom", "    ^", "c++: fatal error: Killed signal terminated program cc1plus"]
    )
    text = _build._explain(output)
    assert text.splitlines()[1] == "  a.cpp:1:1: error: boom"
    assert "MAX_JOBS=1" in text


# ---------- damaged, foreign


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_library_is_built_again(sandbox: Sandbox, damage: str) -> None:
    path = Path(sandbox.run()[0]["path"])
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(b"" if damage == "cut" else b"\x7fELF".ljust(size, b"?"))
    info, _ = sandbox.run()
    assert "built now" in info["reason"]
    assert Path(info["path"]).stat().st_size == size


def test_operators_that_are_there_already_are_used(sandbox: Sandbox, library: Path) -> None:
    code = f"import torch; torch.ops.load_library({str(library)!r}); {SHOW}"
    info, _ = sandbox.run(code)
    assert info["kind"] == "process"
    assert info["path"] is None
    assert not sandbox.calls("compile")


def plant_ahead_of_time(sandbox: Sandbox, library: Path, **changes: str) -> Path:
    mark = _build.fingerprint(sandbox.root / "csrc")
    facts = {"source": mark.source, "torch": mark.torch, "machine": mark.machine, **changes}
    target = sandbox.root / "torch_cpu_moe" / "_aot"
    target.mkdir()
    path = Path(shutil.copy2(library, target / "cpu_moe.so"))
    _build.record(target, path, _build.Fingerprint(**facts), "some compiler", None)
    return path


def test_library_built_ahead_of_time_is_preferred(sandbox: Sandbox, library: Path) -> None:
    path = plant_ahead_of_time(sandbox, library)
    info, err = sandbox.run(CXX="no-such-compiler")
    assert (info["kind"], info["path"], err) == ("aot", str(path), "")


@pytest.mark.parametrize("change", ["torch", "machine", "source"])
def test_library_for_something_else_is_not_used(sandbox: Sandbox, library: Path, change: str) -> None:
    plant_ahead_of_time(sandbox, library, **{change: "2.0 other"})
    info, _ = sandbox.run()
    assert info["kind"] == "jit"
    assert "the library in the package was built" in info["reason"]
    assert ("other sources" if change == "source" else "2.0 other") in info["reason"]


def test_library_ahead_of_time_that_does_not_load(sandbox: Sandbox, library: Path) -> None:
    path = plant_ahead_of_time(sandbox, library)
    path.write_bytes(bytes(path.stat().st_size))
    info, _ = sandbox.run()
    assert info["kind"] == "jit"
    assert "does not load" in info["reason"]


# ---------- the real library


def test_the_library_in_use() -> None:
    info = torch_cpu_moe.build_info()
    assert info["kind"] in ("aot", "jit")
    assert torch_cpu_moe.library_path() == info["path"]
    assert info["torch"].startswith(torch.__version__)
    assert _loader.load() is _loader.loaded()
    path = Path(info["path"])
    assert b"libtorch_python" not in path.read_bytes()  # usable without Python
