"""Tokens/s of a model's MoE layers: every layer has its own memory, which together is much larger than the caches, and
norm and router stand between the operators as in the model.

With --contend also beside a thread that streams host memory, as a PCIe gather does, and with attention over a KV cache
between the layers; alone and contended in turn. Where the memory does not hold the model, a part of it is measured,
and the output says which; tokens/s of all layers are then extrapolated, and labelled so. Not in the numbers are the
model's dense layers, shared experts, embedding, sampling and, without --contend, attention.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import arguments, memory
from .compare import Configuration, alternate, configurations, verdict
from .contend import GROUP, HEAD, HEADS, Attention, Stream
from .measure import Rate, bandwidth, expert_bytes, last_level_cache, percentile, spread
from .presets import PRESETS, Geometry
from .report import IN_A_STACK, Report, n_text, share_text
from .stack import Sample, Stack

STREAM_BYTES = 1 << 30  # inside memory.RESERVE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_geometry(parser, PRESETS["Qwen3-30B-A3B"])
    parser.add_argument("--layers", type=arguments.positive, help="layers with experts (default: the preset's)")
    parser.add_argument("--tokens", type=arguments.positive, default=1, help="tokens in a step, M (default: 1)")
    parser.add_argument("--steps", type=arguments.positive, default=8, help="steps in a measurement (default: 8)")
    parser.add_argument("--gib", type=arguments.amount, help="GiB for the layers (default: all that is available)")
    parser.add_argument("--contend", action="store_true", help="also beside a stream of host memory and attention")
    parser.add_argument("--contend-gbs", type=arguments.amount, help="GB/s that the stream keeps below (default: none)")
    parser.add_argument(
        "--context", type=arguments.positive, default=4096, help="tokens in each layer's KV cache (default: 4096)"
    )
    arguments.add_common(parser, formats="the one that the preset is published in")


@dataclass(frozen=True)
class Case:
    configuration: Configuration
    contended: bool

    @property
    def label(self) -> str:
        return " ".join(filter(None, [self.configuration.label, "contended" if self.contended else "alone"]))


def row_of(
    name: str, case: Case, samples: list[Sample], cut: memory.Cut, geometry: Geometry, bank_bytes: int
) -> dict[str, Any]:
    layers = [s for sample in samples for s in sample.layer_seconds]
    rates = [sample.tokens_per_s for sample in samples]
    row: dict[str, Any] = {"format": name, "configuration": case.configuration.label, "contended": case.contended}
    row |= bandwidth([Rate(sample.gb_per_s, sample.read) for sample in samples])
    row |= {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_extrapolated": statistics.median(rates) * cut.layers / geometry.layers,
        "layers": cut.layers,
        "of_layers": geometry.layers,
        "experts": cut.experts,
        "of_experts": geometry.experts,
        "bank_gib": bank_bytes / 2**30,
        "layer_ms_p50": 1e3 * percentile(layers, 50),
        "layer_ms_p99": 1e3 * percentile(layers, 99),
        "layer_samples": len(layers),
        "experts_part": statistics.median(sample.experts_part for sample in samples),
        "spread": spread(rates),
    }
    if case.contended:
        row["attention_ms"] = statistics.median(sample.attention_ms for sample in samples)
        row["stream_gb_per_s"] = statistics.median(sample.stream_gb_per_s or 0.0 for sample in samples)
    return row


def line_of(row: dict[str, Any], label: str, width: int) -> str:
    whole = "" if row["layers"] == row["of_layers"] else f" ({row['tokens_per_s_extrapolated']:.2f} extrapolated)"
    text = (
        f"{row['format']:<10}{label:<{width}}{share_text(row)}  {row['tokens_per_s']:.2f} tokens/s of {row['layers']} "
        f"layers{whole}  layer p50 {row['layer_ms_p50']:.3f} p99 {row['layer_ms_p99']:.3f} ms, "
        f"experts {100 * row['experts_part']:.0f}%  {n_text(row)}"
    )
    if row["contended"]:
        text += f"  stream {row['stream_gb_per_s']:.1f} GB/s, attention {row['attention_ms']:.3f} ms a layer"
    return text


def statement(geometry: Geometry, cuts: set[memory.Cut], cold: bool, contend: bool, tokens: int, context: int) -> str:
    parts = [
        f"{cut.layers} of {geometry.layers} MoE layers with {cut.experts} of {geometry.experts} experts"
        for cut in sorted(cuts, key=lambda cut: (cut.layers, cut.experts))
    ]
    beside = "nothing else uses the memory"
    if contend:
        beside = f"alone, and with attention over {context} tokens and beside a stream of host memory"
    return (
        f"{geometry.name} ({geometry.shape}), {' or '.join(parts)}, M={tokens}, "
        f"{'cold' if cold else 'NOT COLD (banks below 8 last-level caches)'}: norm, router and routed experts of "
        f"each layer, {beside}"
    )


def main(args: argparse.Namespace) -> int:
    from .. import _host
    from .._ceiling import Ceiling

    shape = args.geometry
    if args.contend_gbs is not None and not args.contend:
        raise ValueError(f"--contend-gbs needs --contend, got --contend-gbs {args.contend_gbs:g} alone")
    names = arguments.formats(args, shape, shape.formats[:1])
    settings = configurations(args.ab, args.precision)
    cases = [Case(c, contended) for c in settings for contended in ((False, True) if args.contend else (False,))]
    layer_bytes = 2 * shape.hidden * shape.experts + (Attention.bytes(args.context) if args.contend else 0)
    allowed = memory.budget(args.gib, _host.memory())
    each = {name: expert_bytes(name, shape) for name in names}
    cuts = {name: memory.fit(shape, each[name], layer_bytes, allowed) for name in names}
    sizes = {name: each[name] * cut.layers * cut.experts for name, cut in cuts.items()}
    cold = min(sizes.values()) >= 8 * last_level_cache()
    what = statement(shape, set(cuts.values()), cold, args.contend, args.tokens, args.context)
    report = Report(args, IN_A_STACK, what)
    if args.contend:
        report.note(
            f"the stream takes a core, which a card's engine does not; attention: {HEADS * GROUP} heads of {HEAD} over "
            f"{HEADS} of the cache, bf16, {torch.get_num_threads()} torch threads; the reads are contended as well"
        )
    ceiling = Ceiling()
    stream = Stream(STREAM_BYTES, args.contend_gbs) if args.contend else None
    width = max(len(case.label) for case in cases) + 2
    for name in names:
        cut = cuts[name]
        stack = Stack(name, shape, cut, args.tokens, args.context if args.contend else None)

        def measure(case: Case, stack: Stack = stack) -> Sample:
            precision = case.configuration.precision
            with case.configuration.active(), stream if case.contended and stream else nullcontext():
                stack.step(precision, case.contended)  # starts threads anew where their number changed
                steps, reads = [], []
                for _ in range(args.steps):
                    steps.append(stack.step(precision, case.contended))
                    reads.append(ceiling.read(steps[-1].bytes))
            sample = Sample.of(steps, reads, args.tokens)
            if case.contended and stream:
                sample.stream_gb_per_s = stream.gb_per_s
            return sample

        with torch.inference_mode():
            samples = alternate(args.repeat, cases, measure)
        for case in cases:
            row = row_of(name, case, samples[case], cut, shape, sizes[name])
            report.row(row, line_of(row, case.label, width))
        for contended in {case.contended for case in cases} if args.ab else ():
            rates = {c.configuration.label: samples[c] for c in cases if c.contended == contended}
            report.verdict(
                f"{name} {'contended' if contended else 'alone'}, tokens/s",
                verdict({label: [s.tokens_per_s for s in values] for label, values in rates.items()}),
            )
        for setting in settings if args.contend else ():
            pair = {c.label: [s.gb_per_s for s in samples[c]] for c in cases if c.configuration == setting}
            report.verdict(f"{name} GB/s of the experts", verdict(pair))
        del stack, measure
    return report.finish()
