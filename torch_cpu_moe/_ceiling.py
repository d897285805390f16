"""The plain-read ceiling: how fast this process, on the operators' own threads, can just read memory."""

from __future__ import annotations

import random
import time

import torch


class Ceiling:
    """Times plain reads of random windows of `data`, by the fastest of the library's read loops.

    `data`: a contiguous tensor much larger than the caches. Rates are in GB/s (1e9 bytes).
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data.view(torch.uint8).flatten()
        variants = range(torch.ops.cpu_moe.stream_read_variants())
        window = min(self._data.numel(), 256 << 20)
        trials = {v: sorted(self._time(window, v) for _ in range(3))[1] for v in variants}
        self.variant = min(trials, key=lambda v: trials[v])

    def _time(self, window: int, variant: int) -> float:
        start = random.randrange(0, self._data.numel() - window + 1) & ~4095
        part = self._data[start : start + window]
        began = time.perf_counter()
        torch.ops.cpu_moe.stream_read(part, variant)
        return time.perf_counter() - began

    def read(self, size: int) -> float:
        """GB/s of one read of `size` bytes (cut to what there is)."""
        size = min(size, self._data.numel())
        return size / self._time(size, self.variant) / 1e9
