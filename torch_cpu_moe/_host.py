"""What this machine is, read from /proc and /sys without the C++ library.

`doctor` needs it when the library cannot be built, and the build needs it to choose how many compilers to run.
Where the library is loaded, its own view (`system_info()`) is what the thread pool acts on. Every function takes
`root`, so that tests can hand in the tree of another machine; what cannot be read is None or empty, never an error.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path("/")


def read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = read(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def parse_cpu_list(text: str) -> list[int]:
    """'0-3,8' as [0, 1, 2, 3, 8] (the format of cpulist files and of Cpus_allowed_list)."""
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cpus


def format_cpu_list(cpus: list[int]) -> str:
    """[0, 1, 2, 3, 8] as '0-3,8'."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def affinity() -> list[int]:
    """The CPUs this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_model(root: Path = ROOT) -> str:
    """The CPU's name as the kernel gives it, e.g. 'AMD EPYC 7313'."""
    text = read(root / "proc/cpuinfo") or ""
    for key in ("model name", "Hardware", "cpu model", "cpu"):
        match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def physical_cores(cpus: list[int], root: Path = ROOT) -> int:
    """Distinct physical cores among `cpus`: two SMT siblings count once."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read(topology / "thread_siblings_list") or read(topology / "core_cpus_list")
        cores.add(siblings or str(cpu))
    return len(cores)


def caches(cpu: int, root: Path = ROOT) -> list[dict[str, Any]]:
    """Data and unified caches of one CPU, from the nearest: name, size in bytes, CPUs that share it."""
    found = []
    for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        kind, level, size = read(index / "type"), read(index / "level"), read(index / "size") or ""
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind == "Instruction" or level is None or not match:
            continue
        scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
        name = f"L{level}" + ("d" if kind == "Data" else "")
        found.append({"name": name, "bytes": int(match[1]) * scale, "shared": read(index / "shared_cpu_list") or ""})
    return found


def numa_nodes(root: Path = ROOT) -> list[dict[str, Any]]:
    """NUMA nodes with their CPUs and memory in bytes; empty where the kernel shows none."""
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        meminfo = read(directory / "meminfo") or ""
        sizes = {key: int(kib) << 10 for key, kib in re.findall(r"(MemTotal|MemFree):\s*(\d+) kB", meminfo)}
        node = int(directory.name[len("node") :])
        nodes.append(
            {
                "node": node,
                "cpus": read(directory / "cpulist") or "",
                "total_bytes": sizes.get("MemTotal"),
                "free_bytes": sizes.get("MemFree"),
            }
        )
    return sorted(nodes, key=lambda item: item["node"])


def memory(root: Path = ROOT) -> dict[str, int | None]:
    """Total and available bytes of RAM, and the tightest cgroup limit (None: no limit)."""
    text = read(root / "proc/meminfo") or ""
    sizes = {key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s*(\d+) kB", text, re.MULTILINE)}
    limits = [
        _read_int(directory / name)
        for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for directory in _cgroup_directories(controller, root)
    ]
    total = sizes.get("MemTotal")
    # cgroup v1 spells "no limit" as a number near 2^63.
    real = [limit for limit in limits if limit is not None and (total is None or limit < total)]
    return {
        "total_bytes": total,
        "available_bytes": sizes.get("MemAvailable"),
        "limit_bytes": min(real) if real else None,
    }


def busy_seconds(root: Path = ROOT) -> float | None:
    """CPU seconds that all processes have used since the machine started, and that the hypervisor took from it."""
    match = re.match(r"cpu +(.+)", read(root / "proc/stat") or "")
    if not match:
        return None
    user, nice, system, _idle, _waiting, *rest = (int(value) for value in match[1].split())
    # rest: interrupts, and what the hypervisor gave to others; guests' time is in user and nice already.
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def huge_pages(root: Path = ROOT) -> dict[str, Any]:
    """Transparent huge pages setting ('always', 'madvise', 'never' or None) and the reserved huge pages."""
    base = root / "sys/kernel/mm"
    setting = re.search(r"\[(\w+)\]", read(base / "transparent_hugepage/enabled") or "")
    reserved = []
    for directory in sorted((base / "hugepages").glob("hugepages-*kB")):
        total, free = _read_int(directory / "nr_hugepages"), _read_int(directory / "free_hugepages")
        size = int(directory.name[len("hugepages-") : -len("kB")]) << 10
        reserved.append({"page_bytes": size, "total": total, "free": free})
    return {"transparent": setting[1] if setting else None, "reserved": reserved}


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the cgroup allows (cpu.max, cpu.cfs_quota_us); None: no limit."""
    quotas = []
    for directory in _cgroup_directories("", root):
        match = re.match(r"(\d+) (\d+)", read(directory / "cpu.max") or "")
        if match and int(match[2]):
            quotas.append(int(match[1]) / int(match[2]))
    for directory in _cgroup_directories("cpu", root):
        quota, period = _read_int(directory / "cpu.cfs_quota_us"), _read_int(directory / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


def _cgroup_directories(controller: str, root: Path) -> Iterator[Path]:
    """This process's cgroup and its ancestors; `controller` is '' for v2, else the name of a v1 controller.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist here: the mount's root, which
    is the container's own group, is always among the answers.
    """
    base = root / "sys/fs/cgroup"
    mounts = [base / "unified", base] if not controller else [base / controller, base / "cpu,cpuacct"]
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if (controller in names.split(",")) if controller else not names:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for mount in mounts:
                for depth in range(len(parts), 0, -1):
                    yield mount.joinpath(*parts[:depth])
    yield from mounts


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs in the affinity mask, no more than the cgroup quota rounded up; at least 1."""
    quota = cpu_quota(root)
    allowed = len(affinity())
    return max(1, min(allowed, math.ceil(quota)) if quota else allowed)
