"""Each format's decode bandwidth beside a plain read of as many bytes, in turn.

An isolated measurement: one layer's operator at a time, nothing else using the memory. It says how good the kernels
are, not what a served model reaches.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

import torch

from . import arguments, memory
from .compare import Configuration, alternate, configurations, verdict
from .measure import (
    Bank,
    Rate,
    bandwidth,
    distinct,
    expert_bytes,
    hidden_and_weights,
    in_turn,
    named,
    random_ids,
    seconds,
)
from .presets import Geometry
from .report import ISOLATED, Report, n_text, share_text

if TYPE_CHECKING:
    from .._ceiling import Ceiling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_geometry(parser)
    parser.add_argument("--tokens", type=arguments.positive, default=1, help="tokens in a call, M (default: 1)")
    parser.add_argument(
        "--gib",
        type=arguments.amount,
        default=1.6,
        help="at least so many GiB of banks are streamed from, in turn (default: 1.6)",
    )
    arguments.add_common(parser)


class Calls:
    """Calls of one token batch over the banks in turn, each with a plain read of as many bytes after it."""

    def __init__(self, banks: list[Bank], args: argparse.Namespace, ceiling: Ceiling) -> None:
        self._banks, self._args, self._ceiling = banks, args, ceiling
        self._generator = torch.Generator().manual_seed(1)
        self._x, self._weights = hidden_and_weights(args, args.tokens, self._generator)
        self._turn = 0
        self._bytes = 0
        self._count = min(max(4, int(5e8 / (banks[0].expert_bytes * args.geometry.top_k))), 100)

    def _one(self, precision: str) -> Rate:
        bank = self._banks[self._turn % len(self._banks)]
        self._turn += 1
        shape = self._args.geometry
        ids = random_ids(self._args.tokens, shape.experts, shape.top_k, self._generator)
        size = distinct(ids) * bank.expert_bytes
        self._bytes += size
        rate = size / seconds(lambda: bank.run(self._x, ids, self._weights, precision)) / 1e9
        return Rate(rate, self._ceiling.read(size))

    def measure(self, configuration: Configuration) -> Rate:
        with configuration.active():
            self._one(configuration.precision)  # starts the pool's threads, finds the fastest read
            calls = [self._one(configuration.precision) for _ in range(self._count)]
        return Rate(statistics.median(c.work for c in calls), statistics.median(c.read for c in calls))

    @property
    def flop_per_byte(self) -> float:
        shape: Geometry = self._args.geometry
        return self._turn * shape.flops(self._args.tokens) / self._bytes


def main(args: argparse.Namespace) -> int:
    from .. import _host
    from .._ceiling import Ceiling

    shape = args.geometry
    names = arguments.formats(args, shape)
    cases = configurations(args.ab, args.precision)
    width = max(len(case.label) for case in cases)
    for name in names:
        memory.check_fits(expert_bytes(name, shape) * shape.experts, "--experts", _host.memory())
    memory.budget(args.gib, _host.memory())
    report = Report(args, ISOLATED, f"one operator at a time, not a served model; M={args.tokens} {shape.shape}")
    ceiling = Ceiling()
    with torch.inference_mode():
        for name in names:
            banks = in_turn(name, shape, args.gib, torch.Generator().manual_seed(0))
            calls = Calls(banks, args, ceiling)
            calls.measure(cases[0])  # warms up
            samples = alternate(args.repeat, cases, calls.measure)
            gib = banks[0].expert_bytes * shape.experts * len(banks) / 2**30
            for case, rates in samples.items():
                row = {"format": name, "configuration": case.label, "tokens": args.tokens, **bandwidth(rates)}
                row |= {"bank_gib": gib, "flop_per_byte": calls.flop_per_byte}
                row["gflop_per_s"] = row["gb_per_s"] * calls.flop_per_byte
                report.row(row, f"{name:<10}{named(case, width)}{share_text(row)}  {n_text(row)}  bank {gib:.1f} GiB")
            if args.ab:
                report.verdict(name, verdict({c.label: [r.work for r in rates] for c, rates in samples.items()}))
    return report.finish()
