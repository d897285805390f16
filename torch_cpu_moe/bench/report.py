"""What a benchmark says: its first line tells how far the numbers can be trusted, its JSON repeats it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import _host, _runtime
from .._version import __version__
from .compare import RULE, Verdict

ISOLATED = "isolated"
IN_A_STACK = "in a model-like stack"
DISTURBED = 0.1  # CPUs that others may use
ABOVE = 1.02  # a share beyond the noise of two medians: something held the reads up


def machine() -> dict[str, Any]:
    """The setting that the options do not show."""
    return {
        "cpu": _host.cpu_model(),
        "cpus_allowed": _host.format_cpu_list(_host.affinity()),
        "memory": _host.memory(),
        "tier": _runtime.tiers()["active"],
        "threads": _runtime.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_cpu_moe": __version__,
        "python": platform.python_version(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("CPU_MOE_", "OMP_", "KMP_"))},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def clocks() -> tuple[float, float, float | None]:
    """Seconds: of the wall, of this process on all CPUs, of all processes of the machine."""
    return time.perf_counter(), time.process_time(), _host.busy_seconds()


def others_cpus(began: tuple[float, float, float | None], ended: tuple[float, float, float | None]) -> float | None:
    """How many CPUs other processes kept busy between two `clocks()`."""
    if began[2] is None or ended[2] is None or ended[0] <= began[0]:
        return None
    return max(0.0, (ended[2] - began[2]) - (ended[1] - began[1])) / (ended[0] - began[0])


class Report:
    """Prints lines as they come, or one JSON object at the end; draws a picture where one was asked for."""

    def __init__(self, args: argparse.Namespace, scope: str, what: str) -> None:
        """`scope`: ISOLATED or IN_A_STACK; `what`: the rest of the first line."""
        self._args = args
        self._scope = scope
        setting = machine()
        used = {
            "precision": args.precision,
            "isa": f"tier {setting['tier']}",
            "threads": f"{setting['threads']} threads",
            "cpu": setting["cpu"],
        }
        if getattr(args, "ab", None):
            key, values = args.ab
            used[key] = f"{key} {' against '.join(values)}"
        self.statement = f"{scope}: {what}; {', '.join(used.values())}"
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k in args.options}
        self._document: dict[str, Any] = {
            "benchmark": args.what,
            "scope": scope,
            "statement": self.statement,
            "setting": {"options": options, "geometry": vars(args.geometry), **setting},
            "notes": [],
            "rows": [],
            "verdicts": [],
        }
        self._say(self.statement)
        self._began = clocks()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr if self._args.json else sys.stdout, flush=True)

    def note(self, text: str) -> None:
        self._document["notes"].append(text)
        self._say(text)

    def row(self, row: dict[str, Any], line: str) -> None:
        self._document["rows"].append({"scope": self._scope, **row})
        if not self._args.json:
            self._say(line)

    def verdict(self, about: str, found: Verdict) -> None:
        self._document["verdicts"].append(
            {"about": about, "winner": found.winner, "n": found.cycles, "ratios": found.ratios, "text": found.text}
        )
        if not self._args.json:
            self._say(f"{about}: {found.text}")

    def finish(self) -> int:
        """The exit status."""
        if self._document["verdicts"]:
            self.note(RULE)
        others = others_cpus(self._began, clocks())
        self._document["setting"]["cpus_of_others"] = others
        if others is not None and others > DISTURBED:
            self.note(f"DISTURBED: other processes used {others:.2f} CPUs meanwhile; measure again when they are idle")
        if self._args.json:
            print(json.dumps(self._document, indent=1), flush=True)
        if self._args.plot:
            from .plot import draw

            draw(self._document, self._args.plot)
            self._say(f"drawn: {self._args.plot}")
        return 0


def share_text(row: dict[str, Any]) -> str:
    """'15.9 GB/s   93% of read ceiling (17.1)'."""
    text = f"{row['gb_per_s']:6.1f} GB/s  {100 * row['share']:3.0f}% of read ceiling ({row['ceiling_gb_per_s']:.1f})"
    return text + (" disturbed: the share says nothing" if row["share"] > ABOVE else "")


def n_text(row: dict[str, Any]) -> str:
    return f"n={row['n']}  spread {100 * row['spread']:.0f}%"
