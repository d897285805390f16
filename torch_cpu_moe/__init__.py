"""Mixture-of-experts layers on the CPU, as PyTorch operators (`torch.ops.cpu_moe.*`).

Importing loads the C++ library, and builds it first if none fits this torch and this source. It starts no thread and
changes no affinity, memory policy, floating-point mode or torch setting.
"""

from . import _loader
from ._build import BuildError
from ._ops import dequantize, experts, experts_out, quantize
from ._runtime import (
    Tiers,
    build_info,
    formats,
    get_num_threads,
    library_path,
    set_num_threads,
    set_tier,
    system_info,
    tiers,
)
from ._version import __version__

__all__ = [
    "BuildError",
    "Tiers",
    "__version__",
    "build_info",
    "dequantize",
    "experts",
    "experts_out",
    "formats",
    "get_num_threads",
    "library_path",
    "quantize",
    "set_num_threads",
    "set_tier",
    "system_info",
    "tiers",
]

if not _loader.started_as_command():
    _loader.load()
