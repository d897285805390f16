"""`python -m torch_cpu_moe`: doctor, its view of other machines' /proc and /sys, and the plumbing of commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_cpu_moe
from torch_cpu_moe import _host, doctor
from torch_cpu_moe.__main__ import COMMANDS, main

PACKAGE_ROOT = Path(torch_cpu_moe.__file__).resolve().parent.parent
ONE_CPU = ("taskset", "-c", str(min(os.sched_getaffinity(0))))


def command(
    *arguments: str, root: Path = PACKAGE_ROOT, prefix: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "torch_cpu_moe", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def doctor_json(status: int = 0, **options: Any) -> dict[str, Any]:
    done = command("doctor", "--json", **options)
    assert done.returncode == status, done.stderr
    facts = json.loads(done.stdout)
    assert isinstance(facts, dict)
    return facts


# ---------- doctor


def test_doctor_reports_what_is_in_use() -> None:
    facts = doctor_json()
    assert facts["tiers"]["active"] in facts["tiers"]["supported"]
    assert set(facts["tiers"]["supported"]) <= set(facts["tiers"]["compiled"])
    assert facts["threads"] == facts["system"]["threads"] >= 1
    assert facts["system"]["threads_reason"]
    assert not facts["system"]["pool"]["created"]  # looking starts no thread
    assert facts["library"]["kind"] in ("aot", "jit")
    assert Path(facts["library"]["path"]).is_file()
    assert facts["library"]["reason"]
    assert facts["cpu"]["allowed"] == _host.format_cpu_list(sorted(os.sched_getaffinity(0)))
    assert facts["memory"]["total_bytes"] > facts["memory"]["available_bytes"] > 0
    assert isinstance(facts["warnings"], list)


def test_doctor_text_says_the_same() -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stderr
    labels = {line[:14].strip() for line in done.stdout.splitlines()}
    assert {"torch", "CPU", "caches", "CPUs allowed", "CPU quota", "memory", "huge pages", "library"} <= labels
    assert {"tier in use", "tiers", "threads", "pool"} <= labels
    assert max(len(line) for line in done.stdout.splitlines()) < 250


@pytest.mark.parametrize("name", ["CPU_MOE_THREADS", "CPU_MOE_ISA", "CPU_MOE_OPENMP"])
def test_doctor_survives_a_bad_setting_and_names_it(name: str) -> None:
    done = command("doctor", **{name: "nonsense"})
    assert done.returncode == 1, "a script would take it that calls work: " + done.stderr
    assert any(line.startswith("warning") and name in line and "nonsense" in line for line in done.stdout.splitlines())


def test_doctor_explains_a_library_that_cannot_be_built(tmp_path: Path) -> None:
    package = PACKAGE_ROOT / "torch_cpu_moe"
    shutil.copytree(package, tmp_path / "torch_cpu_moe", ignore=shutil.ignore_patterns("csrc", "_aot", "__pycache__"))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "library.cpp").write_text("// nothing")
    broken: dict[str, Any] = {"root": tmp_path, "CXX": "no-such-compiler", "CPU_MOE_BUILD_DIR": str(tmp_path / "cache")}
    facts = doctor_json(1, **broken)
    assert "no C++ compiler: 'no-such-compiler'" in facts["library"]["error"]
    assert facts["cpu"]["model"]  # the rest is there all the same
    assert "tiers" not in facts
    text = command("doctor", **broken)
    assert text.returncode == 1
    assert "no C++ compiler" in text.stdout
    assert "Traceback" not in text.stderr
    # Other commands need the library: the same message, no traceback.
    demo = command("demo", **broken)
    assert demo.returncode == 1
    assert "no C++ compiler" in demo.stderr
    assert "Traceback" not in demo.stderr


@pytest.mark.skipif(shutil.which("taskset") is None or (os.cpu_count() or 1) < 2, reason="needs taskset and two CPUs")
def test_doctor_warns_of_a_narrowed_mask() -> None:
    facts = doctor_json(prefix=ONE_CPU, OMP_PROC_BIND="close")
    assert facts["threads"] == 1
    [warning] = [text for text in facts["warnings"] if "this process may run on CPU" in text]
    assert "OMP_PROC_BIND=close" in warning


def test_doctor_warnings_from_the_facts() -> None:
    facts: dict[str, Any] = {
        "library": {},
        "cpu": {"allowed": "0-7", "online": 8, "quota": 0.5},
        "environment": {},
        "huge_pages": {"transparent": "never"},
        "system": {"warnings": ["from the library"]},
    }
    facts["threads"] = 9
    quota, pages, threads, library = doctor._warnings(facts)
    assert "0.50 CPUs" in quota
    assert "transparent huge pages are off" in pages
    assert "9 threads on 8 allowed CPU(s)" in threads
    assert library == "from the library"


# ---------- commands


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option, wanted in (("--version", torch_cpu_moe.__version__), ("--help", "doctor")):
        with pytest.raises(SystemExit, match="0"):
            main([option])
        assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_usage_is_exit_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m torch_cpu_moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--format", "mxfp5"], "unknown weight format 'mxfp5'; expected one of bf16"),
        (["demo", "--layers", "1000000"], "--layers 1000000 needs"),
        (["demo", "--tokens", "0"], "at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.returncode not in (0, -9)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_without_a_compiler_says_what_to_do() -> None:
    """The operators come from the cache, but torch.compile needs a compiler of its own."""
    small = ("demo", "--layers", "1", "--tokens", "2")
    done = command(*small, CXX="/bin/false", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert done.returncode == 1
    assert "--eager" in done.stderr
    assert "Traceback" not in done.stderr
    eager = command(*small, "--eager", CXX="/bin/false")
    assert eager.returncode == 0, eager.stderr
    assert ": right" in eager.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"torch_cpu_moe {name}" in capsys.readouterr().out


# ---------- other machines


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", [])])
def test_cpu_lists(text: str, cpus: list[int]) -> None:
    assert _host.parse_cpu_list(text) == cpus
    assert _host.format_cpu_list(cpus) == text


def test_siblings_are_one_core(tmp_path: Path) -> None:
    pairs = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in pairs.items()}
    assert _host.physical_cores([0, 1, 4, 5], tree(tmp_path, files)) == 2
    assert _host.physical_cores([0, 4], tmp_path) == 1
    assert _host.physical_cores([7, 8], tmp_path) == 2  # unknown CPUs count for themselves


def test_quota_of_cgroup_v2_is_the_tightest_on_the_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
        },
    )
    assert _host.cpu_quota(root) == 1.5


def test_quota_in_a_container_is_at_the_mount(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/../../host", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert _host.cpu_quota(root) == 2.0


def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct/docker/x"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x",
            f"{base}/cpu.cfs_quota_us": "50000",
            f"{base}/cpu.cfs_period_us": "100000",
        },
    )
    assert _host.cpu_quota(root) == 0.5
    (root / base / "cpu.cfs_quota_us").write_text("-1\n")
    assert _host.cpu_quota(root) is None


def test_memory_and_its_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB",
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": "1073741824",
        },
    )
    assert _host.memory(root) == {"total_bytes": 8 << 30, "available_bytes": 4 << 30, "limit_bytes": 1 << 30}
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert _host.memory(root)["limit_bytes"] is None


def test_caches_and_huge_pages_and_nodes(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache/index"
    levels = [("1", "Data", "32K"), ("1", "Instruction", "32K"), ("3", "Unified", "16M")]
    files = {}
    for index, (level, kind, size) in enumerate(levels):
        files |= {f"{cache}{index}/level": level, f"{cache}{index}/type": kind, f"{cache}{index}/size": size}
    files |= {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "4",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  1024 kB\nNode 1 MemFree:  512 kB",
    }
    root = tree(tmp_path, files)
    assert [(c["name"], c["bytes"]) for c in _host.caches(0, root)] == [("L1d", 32 << 10), ("L3", 16 << 20)]
    assert _host.huge_pages(root) == {
        "transparent": "never",
        "reserved": [{"page_bytes": 2 << 20, "total": 4, "free": 3}],
    }
    assert _host.numa_nodes(root) == [{"node": 1, "cpus": "4-7", "total_bytes": 1 << 20, "free_bytes": 512 << 10}]


def test_nothing_readable_is_no_error(tmp_path: Path) -> None:
    assert _host.cpu_quota(tmp_path) is None
    assert _host.memory(tmp_path) == {"total_bytes": None, "available_bytes": None, "limit_bytes": None}
    assert _host.huge_pages(tmp_path) == {"transparent": None, "reserved": []}
    assert _host.numa_nodes(tmp_path) == []
    assert _host.caches(0, tmp_path) == []
    assert _host.cpu_model(tmp_path)
