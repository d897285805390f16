"""Programs that tests run in a process of its own, by the `python` fixture of conftest.py."""

from __future__ import annotations

import os

import pytest

# What they start with: one call of a small layer.
SETUP = """
import json, os, sys, threading, time
import torch, torch_cpu_moe, formats
bank = formats.make_bank("mxfp4", 4, 64, 64)
args = formats.make_inputs(3, 64, 2, 4)
call = lambda: bank(*args)
"""

# Calls the layer and prints the ValueError that it raises.
PRINT_VALUE_ERROR = """
try:
    call()
except ValueError as error:
    print("ValueError:", error)
"""

cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
