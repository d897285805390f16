"""The tensor operators as typed functions. Each is its `torch.ops.cpu_moe` operator and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


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
    precision: str = "exact",
) -> Tensor:
    """Compute the routed experts of one mixture-of-experts layer.

    For each token m, with e = topk_ids[m, s] and w = topk_weights[m, s]::

        out[m] = sum over s of w * (down[e] @ act(gate_up[e] @ hidden[m] + gate_up_bias[e]) + down_bias[e])

    The weights are read in place, in host memory; only the experts that are routed to are touched. A token's result
    has the same bits in every run, for any number of threads, and whatever other tokens are in the call.

    Args:
        hidden: [M, H] bfloat16, float16 or float32, any strides; M may be 0.
        topk_ids: [M, k] int32 or int64, any strides. Duplicates in a row add up. A negative id is "not mine": it
            contributes exactly 0, and neither its weight nor any expert is read for it.
        topk_weights: [M, k] float32, bfloat16, float16 or float64, any strides.
        gate_up: parts of the first projection [E, 2I, H]: the gate rows, then the up rows (see `interleaved`).
            `formats()` lists the parts of each format. A part is contiguous within an expert; the stride between
            experts is free.
        down: parts of the second projection [E, H, I].
        format: weight format of both projections, one of `formats()`.
        down_format: weight format of `down` where it differs.
        gate_up_bias: [E, 2I] float32, bfloat16 or float16, any strides; in the order of the rows of `gate_up`.
        down_bias: [E, H], likewise.
        activation: what joins gate and up:
            "silu": silu(gate) * up;
            "gelu": gelu(gate) * up, with erf; "gelu_tanh": with the tanh approximation;
            "relu2": relu(gate)^2 * up;
            "swigluoai" (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1), gate clamped above at `limit`, up clamped
            to +-limit;
            "swiglu_clamp": silu(gate) * up with the same clamps.
        alpha: of "swigluoai".
        limit: of "swigluoai" and "swiglu_clamp", > 0; None: no clamp.
        interleaved: the rows of `gate_up` (and its bias) are gate0, up0, gate1, up1, ...
        apply_router_weight_on_input: multiply the token by its weight before the first projection instead of the
            result after the second; needs k = 1.
        precision: "exact": activations are never rounded coarser than bfloat16, sums are float32 or exact integers.
            "fast": may round activations to 8 bits per block; for q4_0 just as ggml does (Q8_0). The format ds_fp4
            rounds them to FP8 either way: that is how its models were trained.

    Returns:
        [M, H], contiguous, of hidden's dtype.

    Raises:
        ValueError: a shape, a number of parts, a layout, a name or an option that does not fit.
        TypeError: a dtype that does not fit.
        IndexError: an expert id >= E; nothing was computed then.
        RuntimeError: a tensor that is not on the CPU, or one that requires grad while grad mode is on.
    """
    return cast(
        Tensor,
        torch.ops.cpu_moe.experts.default(
            hidden,
            topk_ids,
            topk_weights,
            gate_up,
            down,
            format,
            down_format=down_format,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            interleaved=interleaved,
            apply_router_weight_on_input=apply_router_weight_on_input,
            precision=precision,
        ),
    )


def experts_out(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    format: str,
    *,
    out: Tensor,
    down_format: str | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    apply_router_weight_on_input: bool = False,
    precision: str = "exact",
) -> None:
    """`experts` into a tensor that exists.

    Args:
        out: [M, H] of hidden's dtype, overwritten. The other arguments are those of `experts`.

    Raises:
        As `experts`; then `out` is as it was.
    """
    torch.ops.cpu_moe.experts_out.default(
        hidden,
        topk_ids,
        topk_weights,
        gate_up,
        down,
        format,
        down_format=down_format,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        alpha=alpha,
        limit=limit,
        interleaved=interleaved,
        apply_router_weight_on_input=apply_router_weight_on_input,
        precision=precision,
        out=out,
    )


def quantize(weight: Tensor, format: str) -> list[Tensor]:
    """Encode a weight, rounding to nearest (ties to even) under the format's usual rule for scales.

    ========= ===================================================================================================
    format    rule
    ========= ===================================================================================================
    bf16, ... a copy in that dtype
    mxfp4     per 32: 2^(floor(log2(amax)) - 2), saturating (OCP Microscaling Formats v1.0, section 6.3)
    nvfp4     global: amax of the expert's matrix / (6 * 448), in every row; per 16: E4M3 of amax / 6 / global
              (NVIDIA's recipe: the largest value maps to the largest code under the largest scale)
    ds_fp4    per 32: 2^ceil(log2(amax / 6)) (DeepSeek's FP4 reference)
    fp8_block per 128x128: amax / 448 in float32 (DeepSeek-V3)
    q4_0      per 32: the value of largest magnitude / -8, codes as ggml's quantize_row_q4_0_ref: the same bytes
    ========= ===================================================================================================

    Args:
        weight: [E, R, C] float32, bfloat16 or float16; C a multiple of the format's block.
        format: one of `formats()`.

    Returns:
        The format's parts, contiguous: see `formats()`.

    Raises:
        ValueError: an unknown format, or a C that does not fit its block.
        TypeError: a dtype that does not fit.
    """
    return cast(list[Tensor], torch.ops.cpu_moe.quantize.default(weight, format))


def dequantize(weight: Sequence[Tensor], format: str, *, dtype: torch.dtype) -> Tensor:
    """Decode a weight.

    Args:
        weight: the format's parts, as `experts` takes them.
        format: one of `formats()`.
        dtype: float32, bfloat16 or float16.

    Returns:
        [E, R, C], contiguous, of `dtype`: the decoded values, rounded to it once.

    Raises:
        ValueError, TypeError: as `experts`.
    """
    return cast(Tensor, torch.ops.cpu_moe.dequantize.default(weight, format, dtype=dtype))
