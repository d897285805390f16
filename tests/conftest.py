"""Fixtures: every tier this CPU runs, thread counts, guard pages, one fixed hypothesis profile."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import formats
import kernel_build
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

import torch_cpu_moe  # registers the operators (and builds them the first time)

settings.register_profile(
    "fixed",  # the same examples in every run
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=15,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("fixed"), derandomize=False, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

TIERS: list[str] = json.loads(torch.ops.cpu_moe.tiers())["supported"]


@contextmanager
def use_tier(name: str) -> Iterator[None]:
    torch.ops.cpu_moe.set_tier(name)
    try:
        assert json.loads(torch.ops.cpu_moe.tiers())["active"] == name
        yield
    finally:
        torch.ops.cpu_moe.set_tier("auto")


@pytest.fixture
def each_tier() -> Iterator[str]:
    """An iterator over the tiers, each active while it is the current item (for tests with a costly reference)."""

    def walk() -> Iterator[str]:
        for name in TIERS:
            with use_tier(name):
                yield name

    return walk()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on every tier of this CPU."""
    with use_tier(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """set_num_threads, undone after the test."""
    before = torch.ops.cpu_moe.get_num_threads()
    yield torch.ops.cpu_moe.set_num_threads
    torch.ops.cpu_moe.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_objects(tmp_path_factory: pytest.TempPathFactory) -> kernel_build.Objects:
    """Objects of the torch-free kernel tests, shared by all that look at them."""
    return kernel_build.Objects(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=formats.NAMES)
def fmt(request: pytest.FixtureRequest) -> str:
    return request.param


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guard:
    """Copies tensors into mappings of their own, between two pages that may not be touched."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []

    def __call__(self, t: Tensor, side: str) -> Tensor:
        """A copy of t that ends exactly at a forbidden page (side="end") or starts right after one ("start")."""
        size = t.numel() * t.element_size()
        page = mmap.PAGESIZE
        body = -(-size // page) * page
        total = body + 2 * page
        base = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        self._maps.append((base, total))
        start = base + page + (body - size if side == "end" else 0)
        buffer = (ctypes.c_char * size).from_address(start)
        out = torch.frombuffer(buffer, dtype=t.dtype, count=t.numel()).reshape(t.shape)
        formats.raw_copy(out, t)
        for address in (base, base + page + body):
            assert _libc.mprotect(address, page, 0) == 0
        return out

    def bank(self, bank: formats.Bank, side: str) -> formats.Bank:
        """The bank with every part between guard pages (its reference weights are kept)."""
        moved = bank.with_()
        moved.gate_up = [self(p, side) for p in bank.gate_up]
        moved.down = [self(p, side) for p in bank.down]
        return moved

    def release(self) -> None:
        for base, size in self._maps:
            _libc.munmap(base, size)
        self._maps.clear()


@pytest.fixture
def guard() -> Iterator[Guard]:
    g = Guard()
    yield g
    g.release()


@pytest.fixture
def python() -> Callable[..., str]:
    """Runs a Python program in a new process with the package importable; returns what it printed."""
    root = str(Path(torch_cpu_moe.__file__).resolve().parent.parent)

    def run(code: str, *, timeout: float = 120, check: bool = True, prefix: tuple[str, ...] = (), **env: str) -> str:
        path = os.pathsep.join(filter(None, [root, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*prefix, sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, **env},
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            return done.stdout
        return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"

    return run
