"""The plain-read ceiling: how fast this process, on the operators' own threads, can just read memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import _host, _runtime

WINDOWS = (4 << 20, 16 << 20, 64 << 20)  # bytes of a read: a short one has the wake-up of the threads in it
TRIALS = 5


def region_bytes() -> int:
    """1 GiB, or eight times the last-level cache where that is more, but at most a quarter of the memory."""
    names = os.sysconf_names
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _host.memory()["limit_bytes"]]
    return min(max(1 << 30, 8 * cache), min(size for size in sizes if size) // 4)


@contextmanager
def _best_tier() -> Iterator[None]:
    """A slow tier must not have a slow ceiling."""
    tiers = _runtime.tiers()
    best, active = tiers["supported"][0], tiers["active"]
    if best == active:
        yield
        return
    _runtime.set_tier(best)
    try:
        yield
    finally:
        _runtime.set_tier(active)


class Ceiling:
    """Times plain reads of a region of its own, by the fastest of the library's read loops. Rates in GB/s (1e9 bytes).

    Each read goes on where the last one ended, so that all of a region much larger than the caches has passed before
    anything is read again. The loops (with and without prefetch, one to four streams) and sizes are tried in turn, on
    the CPU's best tier, once for each number of threads that is in use when `read` is called.
    """

    def __init__(self, size: int | None = None) -> None:
        self._data = torch.ones(size or region_bytes(), dtype=torch.uint8)  # written, so that every page exists
        self._at = 0
        self._best: dict[int, tuple[int, int]] = {}  # by number of threads: the fastest loop and size of a read

    def _try(self) -> tuple[int, int]:
        loops = range(torch.ops.cpu_moe.stream_read_variants())
        windows = sorted({min(window, self._data.numel()) for window in WINDOWS})
        candidates = [(loop, window) for loop in loops for window in windows]
        trials: dict[tuple[int, int], list[float]] = {candidate: [] for candidate in candidates}
        for turn in range(TRIALS):
            for i in range(len(candidates)):
                loop, window = candidates[(i + turn) % len(candidates)]
                trials[loop, window].append(self._rate(window, loop))
        return max(candidates, key=lambda candidate: statistics.median(trials[candidate]))

    def _rate(self, size: int, loop: int) -> float:
        if self._at + size > self._data.numel():
            self._at = 0
        part = self._data[self._at : self._at + size]
        self._at += -(-size // 4096) * 4096
        began = time.perf_counter()
        torch.ops.cpu_moe.stream_read(part, loop)
        return size / (time.perf_counter() - began) / 1e9

    def read(self, size: int) -> float:
        """GB/s of one read of `size` bytes, or of the size that read fastest if that is more (cut to what there is)."""
        threads = _runtime.get_num_threads()
        with _best_tier():
            if threads not in self._best:
                self._best[threads] = self._try()
            loop, window = self._best[threads]
            return self._rate(min(max(size, window), self._data.numel()), loop)
