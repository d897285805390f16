"""The plain-read ceiling: how fast this process, on the operators' own threads, can just read memory."""

from __future__ import annotations

import os
import statistics
import time

import torch

WINDOW = 64 << 20  # bytes of a trial read
TRIALS = 5


def region_bytes() -> int:
    """1 GiB, or eight times the last-level cache where that is more, but at most a quarter of the memory."""
    names = os.sysconf_names
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(1 << 30, 8 * cache), memory // 4)


class Ceiling:
    """Times plain reads of a region of its own, by the fastest of the library's read loops. Rates in GB/s (1e9 bytes).

    Each read goes on where the last one ended, so that all of a region much larger than the caches has passed before
    anything is read again. The loops (with and without prefetch, one to four streams) are tried in turn.
    """

    def __init__(self, size: int | None = None) -> None:
        self._data = torch.ones(size or region_bytes(), dtype=torch.uint8)  # written, so that every page exists
        self._at = 0
        variants = range(torch.ops.cpu_moe.stream_read_variants())
        trials: dict[int, list[float]] = {v: [] for v in variants}
        for turn in range(TRIALS):
            for i in variants:
                v = (i + turn) % len(variants)
                trials[v].append(self._rate(min(WINDOW, self._data.numel()), v))
        self.variant = max(variants, key=lambda v: statistics.median(trials[v]))

    def _rate(self, size: int, variant: int) -> float:
        if self._at + size > self._data.numel():
            self._at = 0
        part = self._data[self._at : self._at + size]
        self._at += -(-size // 4096) * 4096
        began = time.perf_counter()
        torch.ops.cpu_moe.stream_read(part, variant)
        return size / (time.perf_counter() - began) / 1e9

    def read(self, size: int) -> float:
        """GB/s of one read of `size` bytes (cut to what there is)."""
        return self._rate(min(size, self._data.numel()), self.variant)
