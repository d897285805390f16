"""What fits in the memory, and the memory that a call takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .presets import Geometry

RESERVE = 3 << 30  # torch itself, the ceiling's region and the stream's
MIN_LAYERS = 4  # rather than fewer layers, fewer experts in each
GIB = 1 << 30


def budget(gib: float | None, memory: Mapping[str, int | None]) -> int:
    """Bytes that banks may take: `gib` GiB, or all that is available less a reserve.

    Args:
        memory: as `_host.memory()`; the least of MemAvailable and the cgroup's limit counts.

    Raises:
        ValueError: more is asked for than there is.
    """
    sizes = [size for size in (memory["available_bytes"], memory["limit_bytes"]) if size is not None]
    most = max(0, min(sizes) - RESERVE) if sizes else None
    if gib is None:
        return GIB if most is None else most
    if most is not None and gib * GIB > most:
        raise ValueError(
            f"--gib: {gib:g} GiB of banks do not fit: {min(sizes) / GIB:.1f} GiB are available, of which "
            f"{RESERVE / GIB:.0f} are kept for everything else; expected at most {most / GIB:.1f}"
        )
    return int(gib * GIB)


def check_fits(needed: int, option: str, memory: Mapping[str, int | None]) -> None:
    """ValueError where a bank of `needed` bytes does not fit."""
    most = budget(None, memory)
    if needed > most:
        raise ValueError(
            f"{option}: a bank of {needed / GIB:.1f} GiB does not fit; expected one of at most {most / GIB:.1f} GiB"
        )


@dataclass(frozen=True)
class Cut:
    """What is measured of a model: so many layers with so many experts each."""

    layers: int
    experts: int


def fit(geometry: Geometry, expert_bytes: int, layer_bytes: int, allowed: int) -> Cut:
    """The largest part of a model that fits: whole layers, or where those are few, layers with fewer experts.

    Args:
        expert_bytes: of one expert, in its weight format.
        layer_bytes: of what a layer has besides.
        allowed: bytes for everything.

    Raises:
        ValueError: not even one layer of the fewest experts fits.
    """
    wanted = min(MIN_LAYERS, geometry.layers)
    whole = allowed // (layer_bytes + geometry.experts * expert_bytes)
    if whole >= wanted:
        return Cut(min(whole, geometry.layers), geometry.experts)
    # With few experts a token's neighbours use the same: not below two tokens' worth.
    least = min(2 * geometry.top_k, geometry.experts)
    for layers in range(wanted, 0, -1):
        experts = min(geometry.experts, (allowed // layers - layer_bytes) // expert_bytes)
        if experts >= least:
            return Cut(layers, experts)
    raise ValueError(
        f"--gib: one layer of {least} experts, with its router and cache, takes "
        f"{(layer_bytes + least * expert_bytes) / GIB:.3g} GiB; expected at least that, got {allowed / GIB:.3g}"
    )


def _status(key: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


class PeakRss:
    """How far the process' memory rises above what it was before a call.

    What earlier calls took and kept (their scratch) is added: a later call may have used it again.
    """

    def __init__(self) -> None:
        self._kept = 0

    def of(self, call: Callable[[], object]) -> int | None:
        """Bytes; None where the kernel does not tell."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
        except OSError:
            call()
            return None
        before = _status("VmRSS")
        call()
        peak, after = _status("VmHWM"), _status("VmRSS")
        if before is None or peak is None or after is None:
            return None
        rise = max(0, peak - before) + self._kept
        self._kept += max(0, after - before)
        return rise
