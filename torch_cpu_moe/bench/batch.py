"""How the time grows with the tokens of a call: time(M) / time(1), with all tokens choosing the same experts and with
each choosing at random, and the GB/s of the weights that are touched, each expert counted once.

An isolated measurement, as `bench bw`: one layer's operator at a time, nothing else using the memory.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import arguments, memory
from .compare import alternate
from .measure import (
    Bank,
    Rate,
    bandwidth,
    distinct,
    expert_bytes,
    hidden_and_weights,
    in_turn,
    random_ids,
    seconds,
    spread,
)
from .report import ISOLATED, Report, n_text, share_text

if TYPE_CHECKING:
    from .._ceiling import Ceiling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_geometry(parser)
    parser.add_argument(
        "--tokens",
        type=arguments.listed(arguments.positive),
        default=[1, 2, 4, 8, 16, 32],
        help="tokens in a call, M, with commas between; 1 is added (default: 1,2,4,8,16,32)",
    )
    parser.add_argument(
        "--gib",
        type=arguments.amount,
        default=1.6,
        help="at least so many GiB of banks are streamed from, in turn (default: 1.6)",
    )
    arguments.add_common(parser, ab=False)


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: str  # chosen by the tokens: "same" or "random"


@dataclass
class Sample:
    seconds: float
    rate: Rate
    bytes: float


class Batches:
    """Calls of every case over the banks in turn, each with a plain read of as many bytes after it."""

    def __init__(self, banks: list[Bank], args: argparse.Namespace, ceiling: Ceiling) -> None:
        self._banks, self._args, self._ceiling = banks, args, ceiling
        self._generator = torch.Generator().manual_seed(1)
        self._inputs = {m: hidden_and_weights(args, m, self._generator) for m in (1, *args.tokens)}
        self._turn = 0

    def measure(self, case: Case) -> Sample:
        shape = self._args.geometry
        x, weights = self._inputs[case.tokens]
        times: list[float] = []
        sizes: list[int] = []
        rates, reads = [], []
        while len(times) < 3 or (sum(sizes) < 3e8 and len(times) < 64):
            bank = self._banks[self._turn % len(self._banks)]
            self._turn += 1
            if case.experts == "same":
                ids = random_ids(1, shape.experts, shape.top_k, self._generator).repeat(case.tokens, 1)
            else:
                ids = random_ids(case.tokens, shape.experts, shape.top_k, self._generator)
            size = distinct(ids) * bank.expert_bytes

            def call(bank: Bank = bank, ids: torch.Tensor = ids) -> None:
                bank.run(x, ids, weights, self._args.precision)

            times.append(seconds(call))
            sizes.append(size)
            rates.append(size / times[-1] / 1e9)
            reads.append(self._ceiling.read(size))
        rate = Rate(statistics.median(rates), statistics.median(reads))
        return Sample(statistics.median(times), rate, statistics.mean(sizes))


def cases(tokens: list[int]) -> list[Case]:
    """One token has one case."""
    more = sorted(set(tokens) - {1})
    return [Case(1, "same"), *(Case(m, e) for e in ("same", "random") for m in more)]


def row_of(name: str, case: Case, samples: list[Sample], ones: list[Sample], flops: int) -> dict[str, Any]:
    """Columns of a case; `ones` are the samples of one token from the same cycles."""
    growth = [s.seconds / one.seconds for s, one in zip(samples, ones, strict=True)]
    size = statistics.median(s.bytes for s in samples)
    row: dict[str, Any] = {"format": name, "configuration": "", "tokens": case.tokens, "experts_chosen": case.experts}
    row |= bandwidth([s.rate for s in samples])
    row |= {
        "ms": 1e3 * statistics.median(s.seconds for s in samples),
        "time_over_one": statistics.median(growth),
        "bytes_over_one": size / statistics.median(one.bytes for one in ones),
        "spread": spread(growth) if case.tokens > 1 else spread([s.seconds for s in samples]),
        "flop_per_byte": flops / size,
    }
    row["gflop_per_s"] = row["gb_per_s"] * row["flop_per_byte"]
    return row


def main(args: argparse.Namespace) -> int:
    from .. import _host
    from .._ceiling import Ceiling

    shape = args.geometry
    names = arguments.formats(args, shape)
    for name in names:
        memory.check_fits(expert_bytes(name, shape) * shape.experts, "--experts", _host.memory())
    memory.budget(args.gib, _host.memory())
    report = Report(args, ISOLATED, f"one operator at a time, not a served model; {shape.shape}")
    report.note("GB/s count an expert once, however many tokens chose it")
    ceiling = Ceiling()
    todo = cases(args.tokens)
    with torch.inference_mode():
        for name in names:
            banks = in_turn(name, shape, args.gib, torch.Generator().manual_seed(0))
            batches = Batches(banks, args, ceiling)
            batches.measure(todo[0])  # warms up
            samples = alternate(args.repeat, todo, batches.measure)
            for case in todo:
                row = row_of(name, case, samples[case], samples[todo[0]], shape.flops(case.tokens))
                report.row(
                    row,
                    f"{name:<10}M={case.tokens:<4} {case.experts if case.tokens > 1 else '':<7}"
                    f"{row['ms']:9.3f} ms  {row['time_over_one']:5.2f}x time(1) for {row['bytes_over_one']:4.2f}x the "
                    f"bytes  {share_text(row)}  {n_text(row)}",
                )
    return report.finish()
