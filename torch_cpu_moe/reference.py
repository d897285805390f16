"""Readable references in plain torch and float64: what every weight format means, and what `experts` computes.

For people who want to check a result or a checkpoint, and for `python -m torch_cpu_moe demo`. Nothing here is fast.
The table `FORMATS` is also where the fake kernels look up the shapes of a format's parts. (The test suite compares the
C++ library with references of its own, and this module with those.)

E is the number of experts, R and C the rows and columns of one expert's matrix: [2I, H] for `gate_up`, [H, I] for
`down`. See `Format` for the parts of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# FP4 E2M1 codes 0 to 7 (sign, 2 exponent bits with bias 1, 1 mantissa bit); 8 to 15 are their negatives.
# OCP Microscaling Formats (MX) v1.0, section 5.3.3.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# A part's shape and dtype. Dimensions may be symbolic, so they are typed loosely.
Shape = tuple[Any, ...]
Part = tuple[Shape, torch.dtype]


@dataclass(frozen=True)
class Format:
    """One weight format.

    Attributes:
        name: as the operators take it.
        block: C must be a multiple of it.
        source: where the format is defined.
        parts: (E, R, C) to the shape and dtype of each part, as `quantize` makes them.
        shape: parts to (E, R, C).
        decode: parts to float64 [E, R, C], each value exact.
        activation: what the format's own rule does to the activations that enter a projection, float64 to float64.
    """

    name: str
    block: int
    source: str
    parts: Callable[[Any, Any, Any], list[Part]]
    shape: Callable[[Sequence[Tensor]], Shape]
    decode: Callable[[Sequence[Tensor]], Tensor]
    activation: Callable[[Tensor], Tensor] = lambda x: x


# ------------------------------------------------------------------------------------------------------ decode tables


def e2m1(packed: Tensor) -> Tensor:
    """FP4 codes in bytes u8 [..., n], low nibble first, as float64 [..., 2n]."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[codes.long()]


def e8m0(scale: Tensor) -> Tensor:
    """Scale bytes u8 as float64: 2^(s - 127), and NaN for 255 (OCP MX v1.0, section 5.4.1)."""
    values = torch.exp2(scale.double() - 127.0)
    return values.masked_fill(scale == 255, float("nan"))


def _spread(scale: Tensor, block: int) -> Tensor:
    """Repeat each scale for the `block` columns it belongs to."""
    return scale.double().repeat_interleave(block, dim=-1)


# ------------------------------------------------------------------------------------------------------------ formats


def _dense(name: str, dtype: torch.dtype) -> Format:
    return Format(
        name,
        block=1,
        source="IEEE 754; bfloat16 is the upper half of a float32",
        parts=lambda e, r, c: [((e, r, c), dtype)],
        shape=lambda parts: tuple(parts[0].shape),
        decode=lambda parts: parts[0].double(),
    )


def _nibble_shape(parts: Sequence[Tensor]) -> Shape:
    e, r, half = parts[0].shape
    return e, r, half * 2


def _mx_parts(e: Any, r: Any, c: Any) -> list[Part]:
    return [((e, r, c // 2), torch.uint8), ((e, r, c // 32), torch.uint8)]


def _mx_decode(parts: Sequence[Tensor]) -> Tensor:
    packed, scale = parts
    return e2m1(packed) * _spread(e8m0(scale), 32)


def _nvfp4_parts(e: Any, r: Any, c: Any) -> list[Part]:
    return [
        ((e, r, c // 2), torch.uint8),
        ((e, r, c // 16), torch.float8_e4m3fn),
        ((e, r), torch.float32),
    ]


def _nvfp4_decode(parts: Sequence[Tensor]) -> Tensor:
    packed, scale, glob = parts
    return e2m1(packed) * _spread(scale, 16) * glob.double().unsqueeze(-1)


def _fp8_parts(e: Any, r: Any, c: Any) -> list[Part]:
    return [((e, r, c), torch.float8_e4m3fn), ((e, (r + 127) // 128, (c + 127) // 128), torch.float32)]


def _fp8_decode(parts: Sequence[Tensor]) -> Tensor:
    weight, scale = parts
    _, rows, columns = weight.shape
    blocks = _spread(scale, 128).repeat_interleave(128, dim=1)
    return weight.double() * blocks[:, :rows, :columns]


def _q4_0_shape(parts: Sequence[Tensor]) -> Shape:
    e, r, size = parts[0].shape
    return e, r, size // 18 * 32


def _q4_0_decode(parts: Sequence[Tensor]) -> Tensor:
    blocks = parts[0].reshape(*parts[0].shape[:2], -1, 18)
    d = blocks[..., :2].contiguous().view(torch.float16).double()  # [E, R, C/32, 1]
    quants = blocks[..., 2:]
    codes = torch.cat([quants & 15, quants >> 4], dim=-1)  # byte j holds elements j and j + 16
    return ((codes.double() - 8.0) * d).flatten(-2)


def round_to_fp8_blocks(x: Tensor) -> Tensor:
    """DeepSeek's activation rule (`act_quant` with round_scale): FP8 E4M3 per 128 values with a power-of-two scale.

    Args:
        x: [..., C] of a floating dtype; the last block of 128 may be partial.

    Returns:
        float64 [..., C], each value rounded to nearest even.
    """
    columns = x.shape[-1]
    blocks = torch.nn.functional.pad(x.double(), (0, -columns % 128)).reshape(*x.shape[:-1], -1, 128)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4)
    # The rule divides in float32, and a power of two must round up to itself: do as it does.
    ratio = amax.float() * torch.tensor(1.0 / 448.0, dtype=torch.float32)
    mantissa, exponent = torch.frexp(ratio)
    exponent = exponent - (mantissa == 0.5).int()  # ceil(log2(ratio)), exactly
    scale = torch.exp2(exponent.double())
    rounded = (blocks / scale).clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn).double() * scale
    return rounded.flatten(-2)[..., :columns]


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _dense("bf16", torch.bfloat16),
        _dense("f16", torch.float16),
        _dense("f32", torch.float32),
        Format("mxfp4", 32, "OCP Microscaling Formats (MX) v1.0", _mx_parts, _nibble_shape, _mx_decode),
        Format("nvfp4", 16, "NVIDIA's NVFP4 checkpoints", _nvfp4_parts, _nibble_shape, _nvfp4_decode),
        Format("ds_fp4", 32, "DeepSeek's FP4 checkpoints", _mx_parts, _nibble_shape, _mx_decode, round_to_fp8_blocks),
        Format(
            "fp8_block",
            block=1,
            source="DeepSeek-V3's FP8 checkpoints: 128x128 blocks",
            parts=_fp8_parts,
            shape=lambda parts: tuple(parts[0].shape),
            decode=_fp8_decode,
        ),
        Format(
            "q4_0",
            block=32,
            source="ggml's block_q4_0",
            parts=lambda e, r, c: [((e, r, c // 32 * 18), torch.uint8)],
            shape=_q4_0_shape,
            decode=_q4_0_decode,
        ),
    )
}


def dequantize(weight: Sequence[Tensor], format: str) -> Tensor:
    """Decode a whole weight; parts as `torch_cpu_moe.dequantize` takes them. Returns float64 [E, R, C], exact."""
    return FORMATS[format].decode(weight)


# ---------------------------------------------------------------------------------------------------------- the layer


def activate(gate: Tensor, up: Tensor, activation: str, alpha: float = 1.702, limit: float | None = None) -> Tensor:
    """One of the gated activations of `torch_cpu_moe.experts`, elementwise on tensors of one shape."""
    if activation in ("swigluoai", "swiglu_clamp") and limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation in ("silu", "swiglu_clamp"):
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu":
        return torch.nn.functional.gelu(gate) * up
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "relu2":
        return torch.relu(gate).square() * up
    if activation == "swigluoai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1.0)
    raise ValueError(f"activation: unknown {activation!r}")


def experts(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    format: str,
    *,
    down_format: str | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """What `torch_cpu_moe.experts` computes, in float64 throughout and one route at a time.

    Arguments as there. Only experts that are routed to are decoded, so a bank of any size will do.

    Returns:
        float64 [M, H]: not rounded to the dtype of `hidden`.
    """
    first, second = FORMATS[format], FORMATS[down_format or format]
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in sorted({int(e) for e in topk_ids.flatten().tolist() if e >= 0}):
        w1 = first.decode([part[expert : expert + 1] for part in gate_up])[0]
        w2 = second.decode([part[expert : expert + 1] for part in down])[0]
        for token, slot in (topk_ids == expert).nonzero().tolist():
            weight = topk_weights[token, slot].double()
            x = hidden[token].double()
            if apply_router_weight_on_input:
                x = x * weight
            y = w1 @ first.activation(x)
            if gate_up_bias is not None:
                y = y + gate_up_bias[expert].double()
            gate, up = (y[0::2], y[1::2]) if interleaved else y.chunk(2)
            y = w2 @ second.activation(activate(gate, up, activation, alpha, limit))
            if down_bias is not None:
                y = y + down_bias[expert].double()
            out[token] += y if apply_router_weight_on_input else y * weight
    return out
