"""`python -m torch_cpu_moe bench WHAT`.

Two kinds of numbers, and each run's first line (and the "statement" of its JSON) says which it has:
    isolated: one operator at a time with the memory to itself. How good the kernels are, not what a model reaches.
    in a model-like stack: many layers, each with its own memory, with what stands between them in a model.
Plain reads of memory are timed in the same process, between the calls; a share is of those.
"""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "bw": "isolated: decode bandwidth of each format beside a plain read of as many bytes",
    "batch": "isolated: time of M tokens over that of one, with the same experts and with random ones",
    "decode": "in a model-like stack: tokens/s of a model's MoE layers, alone or beside other traffic",
    "prefill": "isolated: GFLOP/s of many tokens beside torch's float32 matmul",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f".{name}", __name__)
        benchmark = benchmarks.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(benchmark)
        benchmark.set_defaults(module=module)


def main(args: argparse.Namespace) -> int:
    from .arguments import cycles, geometry

    args.options = set(vars(args)) - {"module", "command", "default_geometry"}
    args.geometry = geometry(args)
    args.repeat = cycles(args)
    return int(args.module.main(args))
