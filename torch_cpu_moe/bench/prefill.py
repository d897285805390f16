"""GFLOP/s of many tokens (2 * 3 * H * I * M * k), beside torch's float32 matmul on the same shapes in turn.

torch's numbers are of matmuls alone: once as they fall to each expert, its tokens x [H, 2I] and x [I, H], without
gathering, activation or sum, and once as a single large matmul, which is the most that torch reaches. Routing is
uniform, or skewed: one expert has half of all tokens. An isolated measurement: one layer's operator at a time.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
    spread,
)
from .presets import Geometry
from .report import ISOLATED, Report, n_text

if TYPE_CHECKING:
    from .._ceiling import Ceiling

WEIGHT_BYTES = 512 << 20  # of torch's float32 weights, used in turn: those of all experts may not fit
LARGE = 2048  # rows of the large matmul, at most
ROUTINGS = ("uniform", "skewed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_geometry(parser)
    parser.add_argument(
        "--tokens",
        type=arguments.listed(arguments.positive),
        default=[64, 512, 4096],
        help="tokens in a call, M, with commas between (default: 64,512,4096)",
    )
    parser.add_argument(
        "--routing",
        type=arguments.listed(arguments.one_of(*ROUTINGS)),
        default=list(ROUTINGS),
        help="uniform, skewed or both (default)",
    )
    arguments.add_common(parser, formats="bf16,mxfp4")


def route(routing: str, tokens: int, geometry: Geometry, generator: torch.Generator) -> Tensor:
    """[tokens, k] ids; skewed: expert 0 has half of the tokens, the other experts share the rest evenly."""
    if routing == "uniform":
        return random_ids(tokens, geometry.experts, geometry.top_k, generator)
    ids = random_ids(tokens, geometry.experts - 1, geometry.top_k, generator) + 1
    ids[: tokens // 2, 0] = 0
    return ids


class Matmuls:
    """torch's float32 matmuls for the tokens of each expert."""

    def __init__(self, geometry: Geometry, generator: torch.Generator) -> None:
        h, i = geometry.hidden, geometry.intermediate
        count = min(geometry.experts, max(2, WEIGHT_BYTES // (12 * h * i)))
        self._gate_up = [torch.randn(h, 2 * i, generator=generator) for _ in range(count)]
        self._down = [torch.randn(i, h, generator=generator) for _ in range(count)]
        self._geometry = geometry
        self.large(1)  # starts torch's threads

    def per_expert(self, ids: Tensor) -> float:
        """GFLOP/s."""
        h, i = self._geometry.hidden, self._geometry.intermediate
        counts = torch.bincount(ids.flatten()).tolist()
        most = max(counts)
        x, middle = torch.ones(most, h), torch.ones(most, i)
        projected, out = torch.ones(most, 2 * i), torch.ones(most, h)

        def run() -> None:
            for expert, m in enumerate(counts):
                if m:
                    turn = expert % len(self._down)
                    torch.mm(x[:m], self._gate_up[turn], out=projected[:m])
                    torch.mm(middle[:m], self._down[turn], out=out[:m])

        return 6 * h * i * ids.numel() / seconds(run) / 1e9

    def large(self, rows: int) -> float:
        """GFLOP/s."""
        h, i = self._geometry.hidden, self._geometry.intermediate
        x, out = torch.ones(min(rows, LARGE), h), torch.ones(min(rows, LARGE), 2 * i)
        return 4 * len(x) * h * i / seconds(lambda: torch.mm(x, self._gate_up[0], out=out)) / 1e9


@dataclass
class Sample:
    gflops: float
    per_expert: float
    large: float
    rate: Rate


class Calls:
    """One call with so many tokens, torch's matmuls and a plain read, in turn."""

    def __init__(
        self, bank: Bank, args: argparse.Namespace, tokens: int, routing: str, matmuls: Matmuls, ceiling: Ceiling
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self._bank, self._matmuls, self._ceiling = bank, matmuls, ceiling
        self._x, self._weights = hidden_and_weights(args, tokens, generator)
        self.ids = route(routing, tokens, args.geometry, generator)
        self._flops: int = args.geometry.flops(tokens)
        self._bytes = distinct(self.ids) * bank.expert_bytes

    def call(self, precision: str) -> Tensor:
        return self._bank.run(self._x, self.ids, self._weights, precision)

    def measure(self, configuration: Configuration) -> Sample:
        from .. import _host, _runtime

        torch_threads = torch.get_num_threads()
        with configuration.active():
            try:
                # The same number for both, but where there are fewer CPUs torch would only lose by more threads.
                torch.set_num_threads(min(_runtime.get_num_threads(), _host.usable_cpus()))
                self._bank.run(self._x[:1], self.ids[:1], self._weights[:1], configuration.precision)  # starts threads
                time = seconds(lambda: self.call(configuration.precision))
                per_expert, large = self._matmuls.per_expert(self.ids), self._matmuls.large(self.ids.numel())
                read = self._ceiling.read(self._bytes)
            finally:
                torch.set_num_threads(torch_threads)
        return Sample(self._flops / time / 1e9, per_expert, large, Rate(self._bytes / time / 1e9, read))

    @property
    def flop_per_byte(self) -> float:
        return self._flops / self._bytes


def row_of(
    name: str, label: str, samples: list[Sample], flop_per_byte: float, tokens: int, flops: int
) -> dict[str, Any]:
    gflops = [s.gflops for s in samples]
    row: dict[str, Any] = {"format": name, "configuration": label, "tokens": tokens}
    row |= bandwidth([s.rate for s in samples])
    return row | {
        "gflop_per_s": statistics.median(gflops),
        "torch_gflop_per_s": statistics.median(s.per_expert for s in samples),
        "torch_large_gflop_per_s": statistics.median(s.large for s in samples),
        "over_torch": statistics.median(s.gflops / s.per_expert for s in samples),
        "over_torch_large": statistics.median(s.gflops / s.large for s in samples),
        "tokens_per_s_of_one_layer": 1e9 * statistics.median(gflops) * tokens / flops,
        "spread": spread(gflops),
        "flop_per_byte": flop_per_byte,
    }


def line_of(row: dict[str, Any], rise: int | None) -> str:
    above = "unknown" if rise is None else f"+{rise / 2**20:.0f} MiB"
    return (
        f"{row['gflop_per_s']:7.1f} GFLOP/s  {100 * row['over_torch']:3.0f}% of torch's matmuls per expert "
        f"({row['torch_gflop_per_s']:.1f}), {100 * row['over_torch_large']:3.0f}% of its large matmul "
        f"({row['torch_large_gflop_per_s']:.1f})  {row['tokens_per_s_of_one_layer']:.0f} tokens/s of one layer  "
        f"{n_text(row)}  peak memory {above}"
    )


def main(args: argparse.Namespace) -> int:
    from .. import _host
    from .._ceiling import Ceiling

    shape = args.geometry
    names = arguments.formats(args, shape, ("bf16", "mxfp4"))
    if "skewed" in args.routing and shape.experts <= shape.top_k:
        raise ValueError(f"--routing: skewed needs more --experts than --top-k ({shape.top_k}), got {shape.experts}")
    cases = configurations(args.ab, args.precision)
    width = max(len(case.label) for case in cases)
    for name in names:
        memory.check_fits(expert_bytes(name, shape) * shape.experts, "--experts", _host.memory())
    report = Report(
        args, ISOLATED, f"one operator at a time, not a served model; prefill, {shape.shape}; torch {torch.__version__}"
    )
    ceiling, generator, peak = Ceiling(), torch.Generator().manual_seed(0), memory.PeakRss()
    with torch.inference_mode():
        matmuls = Matmuls(shape, generator)
        for name in names:
            [bank] = in_turn(name, shape, 0, generator)
            for tokens in args.tokens:
                for routing in args.routing:
                    calls = Calls(bank, args, tokens, routing, matmuls, ceiling)
                    rise = peak.of(lambda calls=calls: calls.call(cases[0].precision))  # type: ignore[misc]
                    samples = alternate(args.repeat, cases, calls.measure)
                    for case in cases:
                        row = row_of(
                            name, case.label, samples[case], calls.flop_per_byte, tokens, shape.flops(tokens)
                        ) | {"routing": routing, "peak_rss_above_bank": rise}
                        start = f"{name:<10}M={tokens:<5} {routing:<8}{named(case, width)}"
                        report.row(row, start + line_of(row, rise))
                    if args.ab:
                        found = verdict({c.label: [s.gflops for s in samples[c]] for c in cases})
                        report.verdict(f"{name} M={tokens} {routing}", found)
    return report.finish()
