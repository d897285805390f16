"""Fake (meta) kernels: what the operators return, for torch.compile, torch.export and meta tensors.

Shape, dtype and strides are functions of shapes and dtypes alone: results are contiguous whatever the inputs' strides.
The checks here compare only sizes that are plain integers. Comparing symbolic ones would add guards and pin a dynamic
M; the real kernels check everything when they run.

torch needs these in Python even though the library could register meta kernels: only a Python one lets a fake CUDA
`hidden` meet a bank in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .reference import FORMATS, Format

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROUTER_FLOATS = (*FLOATS, torch.float64)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglu_clamp")
CLAMPING = ("swigluoai", "swiglu_clamp")
PRECISIONS = ("exact", "fast")

_library: torch.library.Library | None = None  # the registrations live as long as this object


def register() -> None:
    """Attach the fake kernels to the operators, which must exist. Further calls do nothing."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("cpu_moe", "FRAGMENT")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., Any]] = {
        "experts": _experts,
        "experts_out": _experts_out,
        "dequantize": _dequantize,
        "quantize": _quantize,
    }
    for name, kernel in kernels.items():
        torch.library.register_fake(f"cpu_moe::{name}", kernel, lib=_library)


def _format(name: str, argument: str = "format") -> Format:
    if name not in FORMATS:
        raise ValueError(f"{argument}: unknown {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _same(value: Any, wanted: Any) -> bool:
    """Whether two sizes are equal, or not known yet."""
    return not (isinstance(value, int) and isinstance(wanted, int)) or value == wanted


def _check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name}: expected {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def _check_rank(name: str, tensor: Tensor, dims: Sequence[str]) -> None:
    if tensor.dim() != len(dims):
        raise ValueError(f"{name}: expected shape [{', '.join(dims)}], got {list(tensor.shape)}")


def _check_parts(name: str, parts: Sequence[Tensor], fmt: Format) -> tuple[Any, ...]:
    """Check the number of parts and their known sizes; returns (E, R, C)."""
    wanted = len(fmt.parts(1, 1, fmt.block))
    if len(parts) != wanted:
        raise ValueError(f"{name}: format {fmt.name!r} has {wanted} part(s), got {len(parts)}")
    _check_rank(f"{name}[0]", parts[0], ("E", "R", "C"))
    shape = fmt.shape(parts)
    for index, (part, (dims, dtype)) in enumerate(zip(parts, fmt.parts(*shape), strict=True)):
        scales = fmt.name == "fp8_block" and index == 1  # the one part with a choice
        _check_dtype(f"{name}[{index}]", part, (torch.float32, torch.bfloat16) if scales else (dtype,))
        if part.dim() != len(dims) or not all(map(_same, part.shape, dims)):
            raise ValueError(f"{name}[{index}]: expected shape {list(dims)}, got {list(part.shape)}")
    return shape


def _check_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    format: str,
    down_format: str | None,
) -> None:
    _check_rank("hidden", hidden, ("M", "H"))
    _check_dtype("hidden", hidden, FLOATS)
    _check_rank("topk_ids", topk_ids, ("M", "k"))
    _check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    _check_rank("topk_weights", topk_weights, ("M", "k"))
    _check_dtype("topk_weights", topk_weights, ROUTER_FLOATS)
    tokens, width = hidden.shape
    if not _same(topk_ids.shape[0], tokens):
        raise ValueError(f"topk_ids: expected {tokens} rows as in hidden, got {list(topk_ids.shape)}")
    if not all(map(_same, topk_weights.shape, topk_ids.shape)):
        raise ValueError(f"topk_weights: expected shape {list(topk_ids.shape)}, got {list(topk_weights.shape)}")
    experts, rows, columns = _check_parts("gate_up", gate_up, _format(format))
    second = _format(format) if down_format is None else _format(down_format, "down_format")
    down_shape = _check_parts("down", down, second)
    if not _same(columns, width):
        raise ValueError(f"gate_up: expected {width} columns (hidden's H), got {columns}")
    if isinstance(rows, int) and rows % 2:
        raise ValueError(f"gate_up: expected an even number of rows (2I), got {rows}")
    if not all(map(_same, down_shape, (experts, width, rows // 2))):
        raise ValueError(f"down: expected {[experts, width, rows // 2]} (E, H, I), got {list(down_shape)}")


def _check_options(topk_ids: Tensor, options: dict[str, Any]) -> None:
    for name, known in (("activation", ACTIVATIONS), ("precision", PRECISIONS)):
        value = options.get(name, known[0])
        if value not in known:
            raise ValueError(f"{name}: unknown {value!r}; expected one of {', '.join(known)}")
    limit, alpha = options.get("limit"), options.get("alpha")
    if isinstance(limit, float) and (options.get("activation") not in CLAMPING or not limit > 0):
        raise ValueError(f"limit: expected a number above 0, with {' or '.join(CLAMPING)}; got {limit}")
    if isinstance(alpha, float) and not math.isfinite(alpha):
        raise ValueError(f"alpha: expected a finite number, got {alpha}")
    if isinstance(topk_ids.shape[1], int) and topk_ids.shape[1] < 1:
        raise ValueError(f"topk_ids: expected k >= 1, got {list(topk_ids.shape)}")
    for name in ("gate_up_bias", "down_bias"):
        if (bias := options.get(name)) is not None:
            _check_rank(name, bias, ("E", "2I" if name == "gate_up_bias" else "H"))
            _check_dtype(name, bias, FLOATS)
    if options.get("apply_router_weight_on_input") and not _same(topk_ids.shape[1], 1):
        raise ValueError(f"apply_router_weight_on_input: expected k = 1, got k = {topk_ids.shape[1]}")


def _check_devices(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    options: dict[str, Any],
) -> None:
    """Real meta tensors beside real ones come here by dispatch: nothing could be computed from such a mixture."""
    named: dict[str, Tensor | None] = {"topk_ids": topk_ids, "topk_weights": topk_weights}
    named |= {f"gate_up[{i}]": part for i, part in enumerate(gate_up)}
    named |= {f"down[{i}]": part for i, part in enumerate(down)}
    named |= {name: options.get(name) for name in ("gate_up_bias", "down_bias", "out")}
    for name, tensor in named.items():
        if tensor is not None and tensor.is_meta != hidden.is_meta:
            raise RuntimeError(
                f"{name}: is on {tensor.device}, but hidden is on {hidden.device}; expected all on the CPU"
            )


def _experts(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    format: str,
    *,
    down_format: str | None = None,
    **options: Any,
) -> Tensor:
    _check_devices(hidden, topk_ids, topk_weights, gate_up, down, options)
    _check_layer(hidden, topk_ids, topk_weights, gate_up, down, format, down_format)
    _check_options(topk_ids, options)
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


def _experts_out(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    format: str,
    *,
    out: Tensor,
    down_format: str | None = None,
    **options: Any,
) -> None:
    _check_devices(hidden, topk_ids, topk_weights, gate_up, down, {**options, "out": out})
    _check_layer(hidden, topk_ids, topk_weights, gate_up, down, format, down_format)
    _check_options(topk_ids, options)
    _check_dtype("out", out, (hidden.dtype,))
    if out.dim() != 2 or not all(map(_same, out.shape, hidden.shape)):
        raise ValueError(f"out: expected shape {list(hidden.shape)}, got {list(out.shape)}")


def _dequantize(weight: Sequence[Tensor], format: str, *, dtype: torch.dtype) -> Tensor:
    shape = _check_parts("weight", weight, _format(format))
    if dtype not in FLOATS:
        raise TypeError(f"dtype: expected bfloat16, float16, float32, got {str(dtype).removeprefix('torch.')}")
    return torch.empty(shape, dtype=dtype, device=weight[0].device)


def _quantize(weight: Tensor, format: str) -> list[Tensor]:
    fmt = _format(format)
    _check_dtype("weight", weight, FLOATS)
    _check_rank("weight", weight, ("E", "R", "C"))
    columns: Any = weight.shape[2]
    if isinstance(columns, int) and columns % fmt.block:
        raise ValueError(f"weight: {format} needs columns in multiples of {fmt.block}, got {columns}")
    return [torch.empty(dims, dtype=dtype, device=weight.device) for dims, dtype in fmt.parts(*weight.shape)]
