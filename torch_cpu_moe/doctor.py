"""`python -m torch_cpu_moe doctor`: what was detected on this machine, what was chosen, and why.

Works, and says what is wrong, when the C++ library cannot be loaded. It loads the library as an import would, so it
may build it first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import _build, _host, _loader, _runtime
from ._version import __version__

# Variables that make a runtime (OpenMP's, usually on import of torch or numpy) narrow the process's affinity mask.
AFFINITY_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
VARIABLES = (
    "CPU_MOE_THREADS",
    "CPU_MOE_ISA",
    "CPU_MOE_BUILD_DIR",
    "CPU_MOE_OPENMP",
    "XDG_CACHE_HOME",
    "CXX",
    "MAX_JOBS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    *AFFINITY_VARIABLES,
)
# What the library reads from the environment, under the name by which its value, or what is wrong with it, is reported.
SETTINGS = ("tiers", "threads", "openmp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else text(facts))
    return 0 if usable(facts) else 1


def usable(facts: dict[str, Any]) -> bool:
    """Whether the operators can be called at all here."""
    return not any(isinstance(facts.get(name), dict) and "error" in facts[name] for name in ("library", *SETTINGS))


# ---------------------------------------------------------------------------------------------------------- the facts


def collect() -> dict[str, Any]:
    """Everything that doctor shows, as plain data. Sizes are in bytes."""
    allowed = _host.affinity()
    facts: dict[str, Any] = {
        "torch_cpu_moe": __version__,
        "package": str(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": torch.__version__,
            "commit": torch.version.git_version,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
        },
        "cpu": {
            "model": _host.cpu_model(),
            "machine": platform.machine(),
            "online": os.cpu_count(),
            "allowed": _host.format_cpu_list(allowed),
            "allowed_physical_cores": _host.physical_cores(allowed),
            "quota": _host.cpu_quota(),
            "caches": _host.caches(allowed[0]) if allowed else [],
        },
        "memory": _host.memory(),
        "huge_pages": _host.huge_pages(),
        "numa_nodes": _host.numa_nodes(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "build_cache": str(_build.cache_root()),
        **_library_facts(),
    }
    facts["warnings"] = list(_warnings(facts))
    return facts


def _library_facts() -> dict[str, Any]:
    try:
        _loader.load()
    except _build.BuildError as error:
        return {"library": {"error": str(error)}}
    facts: dict[str, Any] = {"library": _runtime.build_info()}
    # An invalid CPU_MOE_... value makes these raise; doctor is where a person looks for the reason.
    for name, ask in (
        ("tiers", _runtime.tiers),
        ("threads", _runtime.get_num_threads),
        ("system", _runtime.system_info),
        ("openmp", _openmp_setting),
    ):
        try:
            facts[name] = ask()
        except Exception as error:
            facts[name] = {"error": str(error)}
    return facts


def _openmp_setting() -> str:
    value = os.environ.get("CPU_MOE_OPENMP", "auto")
    if value not in ("auto", "keep"):
        raise ValueError(f'CPU_MOE_OPENMP="{value}" is not valid: expected auto or keep')
    return value


def _warnings(facts: dict[str, Any]) -> Iterator[str]:
    if "error" in facts["library"]:
        yield "the C++ library does not load: see `library`"
    cpu, environment = facts["cpu"], facts["environment"]
    allowed = _host.parse_cpu_list(cpu["allowed"])
    if len(allowed) == 1 and (cpu["online"] or 1) > 1:
        suspects = [f"{name}={environment[name]}" for name in AFFINITY_VARIABLES if name in environment]
        cause = f" ({', '.join(suspects)} may have done that)" if suspects else ""
        yield (
            f"this process may run on CPU {allowed[0]} only, of {cpu['online']}{cause}: one thread will do all the work"
        )
    if cpu["quota"] is not None and cpu["quota"] < 1.0:
        yield f"the cgroup allows {cpu['quota']:.2f} CPUs: even one thread will be stopped now and then"
    if facts["huge_pages"]["transparent"] == "never":
        yield (
            "transparent huge pages are off: address translation will slow large banks down "
            "(echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
        )
    for name in SETTINGS:
        if isinstance(facts.get(name), dict) and "error" in facts[name]:
            yield f"every call will fail: {facts[name]['error']}"
    threads = facts.get("threads")
    if isinstance(threads, int) and threads > len(allowed):
        yield f"{threads} threads on {len(allowed)} allowed CPU(s): expect that to be slower than {len(allowed)}"
    yield from map(str, facts.get("system", {}).get("warnings", []))


# ----------------------------------------------------------------------------------------------------------- the text


def text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    cpu, memory, pages, library = facts["cpu"], facts["memory"], facts["huge_pages"], facts["library"]
    torch_facts = facts["torch"]
    caches = ", ".join(f"{c['name']} {_size(c['bytes'])} (CPUs {c['shared']})" for c in cpu["caches"])
    reserved = ", ".join(f"{p['free']} of {p['total']} free of {_size(p['page_bytes'])}" for p in pages["reserved"])
    quota = "none" if cpu["quota"] is None else f"{cpu['quota']:.2f} CPUs"
    rows: list[tuple[str, str]] = [
        ("torch-cpu-moe", f"{facts['torch_cpu_moe']}, Python {facts['python']}, {facts['platform']}"),
        ("", f"imported from {facts['package']}"),
        ("torch", f"{torch_facts['version']}, {torch_facts['threads']} threads, CUDA {torch_facts['cuda'] or 'none'}"),
        ("CPU", f"{cpu['model']} ({cpu['machine']})"),
        ("caches", caches or "unknown"),
        ("CPUs allowed", f"{cpu['allowed']} of {cpu['online']}: {cpu['allowed_physical_cores']} physical core(s)"),
        ("CPU quota", quota),
        ("memory", f"{_size(memory['available_bytes'])} available of {_size(memory['total_bytes'])}"),
        ("memory limit", _size(memory["limit_bytes"]) if memory["limit_bytes"] else "none"),
        ("huge pages", f"transparent: {pages['transparent'] or 'unknown'}; reserved: {reserved or 'none'}"),
    ]
    rows += [
        (
            f"NUMA node {node['node']}",
            f"CPUs {node['cpus'] or 'none'}, {_size(node['free_bytes'])} free of {_size(node['total_bytes'])}",
        )
        for node in facts["numa_nodes"]
    ]
    rows.append(("environment", " ".join(f"{k}={v}" for k, v in facts["environment"].items()) or "nothing set"))
    if "error" in library:
        rows.append(("library", library["error"]))
    else:
        rows.append(("library", str(library["path"] or "of this process")))
        rows.append(("", library["reason"]))
        if library["compiler"]:
            rows.append(("", f"compiled by {library['compiler']}"))
        rows += _tier_rows(facts["tiers"])
        rows += _pool_rows(facts["threads"], facts["system"])
        if facts["openmp"] == "auto":
            rows.append(("torch's threads", "sleep while an operator runs (CPU_MOE_OPENMP=keep lets them spin)"))
    rows += [("warning", warning) for warning in facts["warnings"]] or [("warnings", "none")]
    width = max(len(label) for label, _ in rows) + 2
    indent = "\n" + " " * width
    return "\n".join(label.ljust(width) + value.replace("\n", indent) for label, value in rows)


def _tier_rows(tiers: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in tiers:
        return [("tiers", tiers["error"])]
    requested = f" (asked for: {tiers['requested']})" if tiers["requested"] else ""
    return [
        ("tier in use", f"{tiers['active']}{requested}"),
        ("tiers", f"compiled: {' '.join(tiers['compiled'])}; this CPU runs: {' '.join(tiers['supported'])}"),
    ]


def _pool_rows(threads: Any, system: dict[str, Any]) -> list[tuple[str, str]]:
    """The pool in two lines; --json has everything that the library reports."""
    if isinstance(threads, dict):
        return [("threads", threads["error"])]
    pool = system.get("pool", {})
    state = pool.get("pinning") if pool.get("created") else "not started: the first call starts it"
    return [
        ("threads", f"{threads}: {system.get('threads_reason', system.get('error', ''))}"),
        ("pool", str(state)),
    ]


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
