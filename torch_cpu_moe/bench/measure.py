"""The measuring core: banks with memory of their own, timed calls, statistics."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _host
from .._synthetic import bytes_of, random_bank
from .compare import Configuration
from .presets import Geometry


@dataclass
class Bank:
    """One layer's experts, and the call that runs them."""

    format: str
    gate_up: list[Tensor]
    down: list[Tensor]
    options: dict[str, Any]
    bias_bytes: int = 0

    @property
    def expert_bytes(self) -> int:
        return bytes_of(self.gate_up) + bytes_of(self.down) + self.bias_bytes

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, precision: str) -> Tensor:
        out: Tensor = torch.ops.cpu_moe.experts.default(
            x, ids, weights, self.gate_up, self.down, self.format, precision=precision, **self.options
        )
        return out

    def clone(self) -> Bank:
        gate_up, down = ([part.clone() for part in parts] for parts in (self.gate_up, self.down))
        return Bank(self.format, gate_up, down, self.options, self.bias_bytes)


def make_bank(name: str, geometry: Geometry, generator: torch.Generator, experts: int | None = None) -> Bank:
    """A random bank in the model's geometry, of fewer experts if so asked."""
    count = experts or geometry.experts
    gate_up, down = random_bank(name, count, geometry.intermediate, geometry.hidden, generator)
    options: dict[str, Any] = {"activation": geometry.activation, "interleaved": geometry.interleaved}
    if geometry.limit is not None:
        options["limit"] = geometry.limit
    bias_bytes = 0
    if geometry.bias:
        for key, size in (("gate_up_bias", 2 * geometry.intermediate), ("down_bias", geometry.hidden)):
            options[key] = (torch.randn(count, size, generator=generator) * 0.1).to(torch.bfloat16)
            bias_bytes += 2 * size
    return Bank(name, gate_up, down, options, bias_bytes)


def expert_bytes(name: str, geometry: Geometry) -> int:
    return make_bank(name, geometry, torch.Generator().manual_seed(0), 1).expert_bytes


def distinct(ids: Tensor) -> int:
    """How many experts are routed to."""
    return len(set(ids.flatten().tolist()))


def random_ids(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """[tokens, top_k]: each token's experts at random, no two the same."""
    return torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def last_level_cache() -> int:
    """Bytes, of all the CPUs that may be used; 0 where it is unknown."""
    last = [caches[-1] for cpu in _host.affinity() if (caches := _host.caches(cpu))]
    return sum({cache["shared"]: int(cache["bytes"]) for cache in last}.values())


def spread(values: Sequence[float]) -> float:
    """The range of the values over their median."""
    return (max(values) - min(values)) / statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent * 100) // 10000) - 1)]


@dataclass
class Rate:
    """GB/s of a measurement's calls and of the plain reads between them: medians."""

    work: float
    read: float


def bandwidth(rates: Sequence[Rate]) -> dict[str, float | int]:
    """Columns of a row, from a measurement a cycle."""
    work, read = [rate.work for rate in rates], [rate.read for rate in rates]
    return {
        "gb_per_s": statistics.median(work),
        "ceiling_gb_per_s": statistics.median(read),
        "share": statistics.median(rate.work / rate.read for rate in rates),
        "n": len(rates),
        "spread": spread(work),
    }


def in_turn(name: str, geometry: Geometry, gib: float, generator: torch.Generator) -> list[Bank]:
    """Copies of a bank of `gib` GiB together, or one that is larger: to be called in turn, so that all is cold."""
    banks = [make_bank(name, geometry, generator)]
    size = banks[0].expert_bytes * geometry.experts
    while size * len(banks) < gib * 2**30:
        progress(f"making banks of {name}: {len(banks) * size / 2**30:.1f} of {gib:g} GiB")
        banks.append(banks[0].clone())
    progress("")
    return banks


def progress(text: str) -> None:
    """A line that the next one replaces, for those who watch."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def named(configuration: Configuration, width: int = 0) -> str:
    return f"{configuration.label:<{width}}  " if configuration.label else ""


def hidden_and_weights(args: argparse.Namespace, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape: Geometry = args.geometry
    x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
    return x, torch.full((tokens, shape.top_k), 1 / shape.top_k)
