"""Comparing settings: what `--ab` changes, the order of the measurements, and when a winner is named."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from .. import _runtime

T = TypeVar("T", bound=Hashable)
S = TypeVar("S")
PRECISIONS = ("exact", "fast")
KEYS = ("threads", "isa", "precision")
# By chance alone, ranges of 4 values lie apart once in 35 times, and 6 pairs fall all on one side once in 32.
APART, PAIRED = 4, 6
RULE = (
    f"a winner is named when the ranges of the cycles' medians lie apart (from {APART} cycles on) or when it is ahead "
    f"in every cycle (from {PAIRED} on): by chance once in 32 comparisons at most"
)


@dataclass(frozen=True)
class Configuration:
    """A setting under which something is measured."""

    label: str = ""
    precision: str = "exact"
    threads: int | None = None
    isa: str | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """The setting, undone afterwards."""
        threads, tier = _runtime.get_num_threads(), _runtime.tiers()["active"]
        try:
            if self.threads is not None and self.threads != threads:
                _runtime.set_num_threads(self.threads)
            if self.isa is not None and self.isa != tier:
                _runtime.set_tier(self.isa)
            yield
        finally:
            if _runtime.get_num_threads() != threads:
                _runtime.set_num_threads(threads)
            if _runtime.tiers()["active"] != tier:
                _runtime.set_tier(tier)


def split(text: str) -> tuple[str, list[str]]:
    """'threads=1,2' as ("threads", ["1", "2"]).

    Raises:
        ValueError: what was given and what was expected; needs no library.
    """
    key, equals, rest = text.partition("=")
    values = rest.split(",")
    if key == "openmp":
        raise ValueError(
            f"openmp cannot change within a process (CPU_MOE_OPENMP is read once): run the benchmark once with each; "
            f"expected one of {', '.join(KEYS)}"
        )
    if key not in KEYS:
        raise ValueError(f"unknown setting {key!r}; expected one of {', '.join(KEYS)}")
    if not equals or len(values) < 2 or len(set(values)) < len(values):
        raise ValueError(f"expected {key}= and two or more different values with commas between, got {text!r}")
    for value in values:
        if key == "threads" and not (value.isdecimal() and 1 <= int(value) <= 4096):
            raise ValueError(f"expected numbers of threads from 1 to 4096, got {value!r}")
        if key == "precision" and value not in PRECISIONS:
            raise ValueError(f"expected precisions out of {', '.join(PRECISIONS)}, got {value!r}")
    return key, values


def configurations(ab: tuple[str, list[str]] | None, precision: str) -> list[Configuration]:
    """What `--ab` asks for, or the one setting as it is. ValueError: a tier that this machine does not run."""
    if ab is None:
        return [Configuration(precision=precision)]
    key, values = ab
    if key == "threads":
        return [Configuration(f"threads={v}", precision, threads=int(v)) for v in values]
    if key == "precision":
        return [Configuration(f"precision={v}", v) for v in values]
    supported = _runtime.tiers()["supported"]
    if unknown := [v for v in values if v not in supported]:
        raise ValueError(f"--ab: this CPU runs {', '.join(supported)}; got isa={unknown[0]}")
    return [Configuration(f"isa={v}", precision, isa=v) for v in values]


def alternate(cycles: int, cases: Sequence[T], measure: Callable[[T], S]) -> dict[T, list[S]]:
    """One measurement of every case in each cycle, in the order A B, B A, A B, ...: a steady drift favours none."""
    samples: dict[T, list[S]] = {case: [] for case in cases}
    for cycle in range(cycles):
        for case in cases if cycle % 2 == 0 else reversed(cases):
            samples[case].append(measure(case))
    return samples


@dataclass(frozen=True)
class Verdict:
    """Who is ahead, as far as the measurements tell."""

    winner: str | None
    slower: tuple[str, ...]  # that another is ahead of
    cycles: int
    ratios: dict[str, tuple[float, float, float]]  # each against the first: median, least and largest of the cycles

    @property
    def text(self) -> str:
        first, *others = self.ratios
        parts = [f"{n} / {first}: {m:.2f}x ({a:.2f} to {b:.2f})" for n in others for m, a, b in [self.ratios[n]]]
        found = f"{self.winner} is faster" if self.winner else "no difference seen"
        if not self.winner and self.slower:
            found = f"none is ahead of all others; slower: {', '.join(self.slower)}"
        if not self.winner and self.cycles < APART:
            found = f"no winner can be named from {self.cycles} cycles, it takes {APART}"
        return f"{found}; {', '.join(parts)}, n={self.cycles}"


def is_ahead(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether `a` is larger than `b` beyond doubt (RULE); each has one value a cycle."""
    if len(a) != len(b) or not all(math.isfinite(value) for value in (*a, *b)):
        return False
    if len(a) >= APART and min(a) > max(b):
        return True
    return len(a) >= PAIRED and all(x > y for x, y in zip(a, b, strict=True))


def verdict(samples: Mapping[str, Sequence[float]]) -> Verdict:
    """The winner of two or more, if it is ahead of every other; `samples` are rates, one a cycle, all as many."""
    first = next(iter(samples.values()))
    ahead = {(a, b) for a in samples for b in samples if a != b and is_ahead(samples[a], samples[b])}
    winner = next((a for a in samples if all((a, b) in ahead for b in samples if b != a)), None)
    slower = tuple(b for b in samples if any((a, b) in ahead for a in samples))
    ratios = {}
    for name, values in samples.items():
        paired = [x / y if y else math.nan for x, y in zip(values, first, strict=True)]
        ratios[name] = (statistics.median(paired), min(paired), max(paired))
    return Verdict(winner, slower, len(first), ratios)
