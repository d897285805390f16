"""Threads, tiers, formats and the library itself: what the process uses and how to change it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypedDict, cast

import torch

from . import _loader


class Tiers(TypedDict):
    """Instruction-set tiers, best first.

    Keys:
        compiled: what the library contains.
        supported: what this CPU and its operating system can run.
        active: the one in use.
        requested: what CPU_MOE_ISA or `set_tier` asked for, or None.
    """

    compiled: list[str]
    supported: list[str]
    active: str
    requested: str | None


def set_num_threads(n: int) -> None:
    """Set the number of threads that an operator uses, the caller's included; the pool is rebuilt at its next use.

    Raises:
        ValueError: n < 1.
    """
    torch.ops.cpu_moe.set_num_threads.default(n)


def get_num_threads() -> int:
    """The number of threads that an operator uses.

    By default one per physical core inside the affinity mask and the cgroup's CPU quota, or CPU_MOE_THREADS.
    """
    return cast(int, torch.ops.cpu_moe.get_num_threads.default())


def tiers() -> Tiers:
    """The instruction-set tiers that are compiled, supported and active."""
    return cast(Tiers, json.loads(torch.ops.cpu_moe.tiers.default()))


def set_tier(name: str) -> None:
    """Use one of `tiers()["supported"]` from the next call on; "auto" goes back to CPU_MOE_ISA, or else the best one.

    Raises:
        ValueError: an unknown tier, or one that this machine cannot run; the message lists those it can.
    """
    torch.ops.cpu_moe.set_tier.default(name)


def formats() -> list[dict[str, Any]]:
    """The weight formats: for each its "name", the "block" that C must be a multiple of, and its "parts" in order, each
    with "name", accepted "dtypes" and "shape" in terms of E, R and C."""
    return cast(list[dict[str, Any]], json.loads(torch.ops.cpu_moe.formats.default()))


def system_info() -> dict[str, Any]:
    """What the library found out about the machine, and what it chose: CPUs, quota, threads and the reason for their
    number, the CPU of each worker."""
    return cast(dict[str, Any], json.loads(torch.ops.cpu_moe.system_info.default()))


def library_path() -> str | None:
    """The C++ library's file (for engines in C++ that load it themselves); None if the process had the operators before
    this package was imported."""
    return _loader.load().path


def build_info() -> dict[str, Any]:
    """How the library in use came about: "path", "kind" ("aot", "jit" or "process"), "reason", "torch", "compiler",
    "source" (digest) and "build_seconds" (None if it was not built in this process)."""
    return asdict(_loader.load())
