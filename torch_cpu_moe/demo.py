"""`python -m torch_cpu_moe demo`: the main job on real-sized work.

A stack of MoE layers in Qwen3-30B-A3B's shape (H 2048, I 768, 128 experts, top-8), larger than the caches, is decoded
token by token through `torch.ops.cpu_moe.experts` inside a compiled module. Sampled outputs are checked against a
float64 reference, and the speed is set beside a plain read of memory timed in the same process, between the tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8
ERROR_BOUND = 1e-3  # ||got - want|| / ||want||, for float32 hidden


class MoeLayer(nn.Module):
    """Router and routed experts of one layer; the bank is plain buffers."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        super().__init__()
        from ._synthetic import random_bank

        self.format = name
        router = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
        self.register_buffer("router", router.to(torch.bfloat16))
        gate_up, down = random_bank(name, EXPERTS, INTERMEDIATE, HIDDEN, generator)
        self.parts = (len(gate_up), len(down))
        for i, part in enumerate(gate_up):
            self.register_buffer(f"gate_up_{i}", part)
        for i, part in enumerate(down):
            self.register_buffer(f"down_{i}", part)

    def bank(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        gate_up = [self.get_buffer(f"gate_up_{i}") for i in range(self.parts[0])]
        return gate_up, [self.get_buffer(f"down_{i}") for i in range(self.parts[1])]

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax((hidden @ self.get_buffer("router").T).float(), -1)
        weights, ids = torch.topk(scores, TOP_K, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(hidden, (HIDDEN,))
        ids, weights = self.route(normed)
        gate_up, down = self.bank()
        routed: torch.Tensor = torch.ops.cpu_moe.experts(normed, ids, weights, gate_up, down, self.format)
        return hidden + routed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="mxfp4", help="weight format, one of `formats()` (default: mxfp4)")
    parser.add_argument(
        "--layers", type=int, default=8, help="MoE layers in the stack (default: 8; 0.3 GiB each in mxfp4)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens to decode (default: 48)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which needs a C++ compiler")
    parser.add_argument("--json", type=Path, help="also write the result to this file")


def check_memory(bank_bytes: int, layers: int) -> None:
    """Refuses banks that do not fit, before they are made."""
    from . import _host

    memory = _host.memory()
    limits = [size for size in (memory["available_bytes"], memory["limit_bytes"]) if size is not None]
    if limits and bank_bytes + (2 << 30) > min(limits):
        raise SystemExit(
            f"demo: --layers {layers} needs {bank_bytes / 2**30:.1f} GiB and some 2 more; "
            f"{min(limits) / 2**30:.1f} GiB are available"
        )


def main(args: argparse.Namespace) -> int:
    from ._ceiling import Ceiling
    from ._runtime import get_num_threads, tiers
    from ._synthetic import bytes_of
    from .reference import experts as experts_in_float64

    if args.layers < 1 or args.tokens < 1:
        raise SystemExit("demo: --layers and --tokens must be at least 1")
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    layers = [MoeLayer(args.format, generator)]
    gate_up, down = layers[0].bank()
    expert_bytes = bytes_of(gate_up) + bytes_of(down)
    bank_bytes = expert_bytes * EXPERTS * args.layers
    check_memory(bank_bytes, args.layers)
    for i in range(1, args.layers):
        if sys.stdout.isatty():
            print(f"\rmaking layer {i + 1} of {args.layers} ({args.format}) ...", end="", flush=True)
        layers.append(MoeLayer(args.format, generator))
    seconds = time.perf_counter() - began
    start = "\r" if sys.stdout.isatty() else ""
    print(f"{start}{args.layers} layers of {EXPERTS} experts, {bank_bytes / 2**30:.2f} GiB, made in {seconds:.0f} s")
    stack = nn.Sequential(*layers).eval()
    compiled = stack if args.eager else torch.compile(stack, fullgraph=True)
    tokens = torch.randn(args.tokens, 1, HIDDEN, generator=generator).to(torch.bfloat16)
    times, reads = [], []
    worst = 0.0
    with torch.inference_mode():
        began = time.perf_counter()
        try:
            compiled(tokens[0])
        except Exception as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            raise SystemExit("demo: torch.compile needs a C++ compiler, and found none: use --eager") from None
        if not args.eager:
            print(f"compiled into one graph in {time.perf_counter() - began:.0f} s", flush=True)
        ceiling = Ceiling()
        for i in range(args.tokens):
            began = time.perf_counter()
            out = compiled(tokens[i])
            elapsed = time.perf_counter() - began
            times.append(elapsed)
            reads.append(ceiling.read(expert_bytes * TOP_K * args.layers))
            if not torch.isfinite(out.float()).all():
                print("demo: FAILED: the output is not finite")
                return 1
        for layer in layers[:: max(1, args.layers // 4)]:
            x = nn.functional.rms_norm(tokens[0], (HIDDEN,))
            ids, weights = layer.route(x)
            got = torch.ops.cpu_moe.experts(x.float(), ids, weights, *layer.bank(), layer.format)[0].double()
            want = experts_in_float64(x, ids, weights, *layer.bank(), layer.format)[0]
            worst = max(worst, float((got - want).norm() / want.norm()))
    ok = worst < ERROR_BOUND
    median = statistics.median(times)
    rate, read = expert_bytes * TOP_K * args.layers / median / 1e9, statistics.median(reads)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    result = {
        "format": args.format,
        "tier": tiers()["active"],
        "threads": get_num_threads(),
        "bank_gib": round(bank_bytes / 2**30, 3),
        "tokens_per_s": round(1 / median, 2),
        "spread": round((quartiles[2] - quartiles[0]) / median, 3),
        "gb_per_s": round(rate, 2),
        "share_of_read_ceiling": round(rate / read, 3),
        "ceiling_gb_per_s": round(read, 2),
        "relative_error": worst,
        "error_bound": ERROR_BOUND,
        "ok": ok,
    }
    print(
        f"{args.format}  {1 / median:.1f} tokens/s  {rate:.1f} GB/s  {100 * rate / read:.0f}% of the plain-read "
        f"ceiling ({read:.1f} GB/s)  {result['tier']}, {result['threads']} threads, n={args.tokens}, "
        f"middle half within {100 * float(str(result['spread'])):.0f}%"
    )
    if rate > read:
        print("The plain read came out slower than the work: something disturbed it, and the share says nothing.")
    verdict = "right" if ok else "WRONG"
    print(f"checked against float64: relative error {worst:.1e}, bound {ERROR_BOUND:g}: {verdict}")
    print("The time is that of whole layers (norm, router and experts); nothing else used the memory beside it.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ok else 1
