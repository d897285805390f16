"""What runs beside the experts in a real engine, in a likeness: a gather's reads, and attention between the layers."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 4 << 20  # bytes of one read: a third of a millisecond, in which Python is free for others
HEADS, GROUP, HEAD = 8, 4, 128  # KV heads, query heads that share one, and its size: common in models of this kind


class Stream:
    """A thread that reads host memory from end to end, as the engine of a PCIe card does for its cache.

    It takes the bandwidth that a gather takes, but also a core, which the card's engine does not: with few cores that
    overstates the harm. It writes nothing.
    """

    def __init__(self, size: int, gbs: float | None = None) -> None:
        """`size`: bytes of its own that it reads in turn; `gbs`: GB/s that it keeps below (None: as fast as it can)."""
        self._data = np.ones(max(size, BLOCK) // BLOCK * BLOCK // 8, dtype=np.uint64)
        self._gbs = gbs
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._read = 0
        self._began = self._elapsed = 0.0

    def _run(self) -> None:
        words, at, seen = BLOCK // 8, 0, np.uint64(0)
        began = time.perf_counter()
        done = 0
        while not self._stop.is_set():
            seen |= np.bitwise_or.reduce(self._data[at : at + words])  # numpy lets Python's lock go meanwhile
            at = (at + words) % len(self._data)
            done += BLOCK
            if self._gbs is not None:
                ahead = done / (self._gbs * 1e9) - (time.perf_counter() - began)
                if ahead > 0:
                    self._stop.wait(ahead)
        self._read, self._elapsed = done, time.perf_counter() - began

    def __enter__(self) -> Stream:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="bench-stream", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def gb_per_s(self) -> float:
        """What the last run achieved."""
        return self._read / self._elapsed / 1e9 if self._elapsed else 0.0


class Attention:
    """Grouped-query attention of M new tokens over a KV cache of `context`, on torch's own threads; one a layer."""

    def __init__(self, tokens: int, context: int, generator: torch.Generator) -> None:
        # The queries of a group are rows of one head: no copy of the cache for each.
        self._query = torch.randn(1, HEADS, GROUP * tokens, HEAD, generator=generator).to(torch.bfloat16)
        self._keys, self._values = (
            torch.randn(1, HEADS, context, HEAD, generator=generator).to(torch.bfloat16) for _ in range(2)
        )

    @staticmethod
    def bytes(context: int) -> int:
        return 2 * 2 * HEADS * HEAD * context

    def run(self) -> Tensor:
        return functional.scaled_dot_product_attention(self._query, self._keys, self._values)
