"""`python -m torch_cpu_moe bench bw`: each format's decode bandwidth beside a plain read of as many bytes, in turn.

An isolated measurement: one layer's operator at a time, nothing else using the memory. It says how good the kernels
are, not what a served model reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._ceiling import Ceiling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["bw"], help="bw: decode bandwidth of each format, isolated")
    parser.add_argument("--formats", help="comma-separated names of `formats()` (default: all)")
    parser.add_argument("--hidden", type=int, default=2048, help="H (default: 2048)")
    parser.add_argument("--intermediate", type=int, default=1024, help="I (default: 1024)")
    parser.add_argument("--experts", type=int, default=64, help="E (default: 64)")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token (default: 8)")
    parser.add_argument("--tokens", type=int, default=1, help="tokens in a call, M (default: 1)")
    parser.add_argument(
        "--gib", type=float, default=1.6, help="at least so many GiB of banks are streamed from, in turn (default: 1.6)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="measurements; the median is quoted (default: 5)")
    parser.add_argument("--precision", default="exact", choices=["exact", "fast"], help="default: exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def measure(name: str, args: argparse.Namespace, ceiling: Ceiling) -> dict[str, Any]:
    """One format's row."""
    from ._synthetic import bytes_of, random_bank

    generator = torch.Generator().manual_seed(0)
    banks = [random_bank(name, args.experts, args.intermediate, args.hidden, generator)]
    expert_bytes = bytes_of(banks[0][0]) + bytes_of(banks[0][1])
    while expert_bytes * args.experts * len(banks) < args.gib * 2**30:
        banks.append(([p.clone() for p in banks[0][0]], [p.clone() for p in banks[0][1]]))
    x = torch.randn(args.tokens, args.hidden, generator=generator).to(torch.bfloat16)
    weights = torch.full((args.tokens, args.top_k), 1 / args.top_k)
    op = torch.ops.cpu_moe.experts.default
    rates, reads = [], []
    calls = max(4, int(2e9 / (expert_bytes * args.top_k)) // 4)
    turn = 0
    with torch.inference_mode():
        for repeat in range(args.repeat + 1):
            pairs = []
            for _ in range(calls):
                ids = torch.stack(
                    [torch.randperm(args.experts, generator=generator)[: args.top_k] for _ in range(args.tokens)]
                )
                size = len(set(ids.flatten().tolist())) * expert_bytes
                gate_up, down = banks[turn % len(banks)]
                turn += 1
                began = time.perf_counter()
                op(x, ids, weights, gate_up, down, name, precision=args.precision)
                pairs.append((size / (time.perf_counter() - began) / 1e9, ceiling.read(size)))
            if repeat:  # the first warms up
                rates.append(statistics.median(p[0] for p in pairs))
                reads.append(statistics.median(p[1] for p in pairs))
        return {
            "format": name,
            "gb_per_s": statistics.median(rates),
            "ceiling_gb_per_s": statistics.median(reads),
            "share": statistics.median(rates) / statistics.median(reads),
            "spread": (max(rates) - min(rates)) / statistics.median(rates),
            "n": args.repeat,
            "bank_gib": expert_bytes * args.experts * len(banks) / 2**30,
        }


def main(args: argparse.Namespace) -> int:
    from ._ceiling import Ceiling
    from ._runtime import formats, get_num_threads, tiers

    names = [f["name"] for f in formats()]
    chosen = args.formats.split(",") if args.formats else names
    if unknown := sorted(set(chosen) - set(names)):
        raise SystemExit(f"bench: --formats: unknown {', '.join(unknown)}; expected some of {', '.join(names)}")
    for option in ("hidden", "intermediate", "experts", "top_k", "tokens", "repeat"):
        if getattr(args, option) < 1:
            raise SystemExit(f"bench: --{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    if args.top_k > args.experts:
        raise SystemExit(f"bench: --top-k must be at most --experts ({args.experts}), got {args.top_k}")
    rows = []
    shape = f"M={args.tokens} H={args.hidden} I={args.intermediate} E={args.experts} top-{args.top_k}"
    print(
        f"isolated: {shape}, {args.precision}, tier {tiers()['active']}, {get_num_threads()} threads",
        file=sys.stderr if args.json else sys.stdout,
        flush=True,
    )
    ceiling = Ceiling()
    for name in chosen:
        row = measure(name, args, ceiling)
        rows.append(row)
        if not args.json:
            print(
                f"{name:<10}{row['gb_per_s']:6.1f} GB/s  {100 * row['share']:3.0f}% of read ceiling "
                f"({row['ceiling_gb_per_s']:.1f})  n={row['n']}  spread {100 * row['spread']:.0f}%  "
                f"bank {row['bank_gib']:.1f} GiB",
                flush=True,
            )
    if args.json:
        print(
            json.dumps(
                {"setting": vars(args), "tier": tiers()["active"], "threads": get_num_threads(), "rows": rows}, indent=1
            )
        )
    return 0
