"""`python -m torch_cpu_moe COMMAND`.

A command is a module with `add_arguments(parser)` and `main(args) -> exit status`. It is imported only when it is
asked for, and must import without the C++ library, which is loaded between the two calls (not for `doctor`, which
explains what is wrong when it does not load).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import cast

from . import _loader
from ._build import BuildError
from ._version import __version__

COMMANDS = {
    "doctor": ("torch_cpu_moe.doctor", "what was detected on this machine, what was chosen, and why"),
    "demo": ("torch_cpu_moe.demo", "decode a real-sized stack of MoE layers, checked and timed"),
    "bench": ("torch_cpu_moe.bench", "benchmarks: bw, batch, decode and prefill"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m torch_cpu_moe", description="Mixture-of-experts on the CPU.")
    parser.add_argument("--version", action="version", version=f"torch-cpu-moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for name, (path, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if arguments[:1] == [name]:
            module = importlib.import_module(path)
            module.add_arguments(command)
    args = parser.parse_args(arguments)
    if args.command != "doctor":
        try:
            _loader.load()
        except BuildError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
    try:
        return cast(int, module.main(args))  # type: ignore[union-attr]  # a parsed command has its module
    except KeyboardInterrupt:
        return 130
    except ValueError as error:  # the library's own: a format, a shape or a setting that does not fit
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
