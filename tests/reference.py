"""Float64 references, written from the formats' specifications and sharing nothing with csrc or torch_cpu_moe.

* decoders and encoders of every weight format, with tables made here from the bit fields;
* `experts`, the whole layer, together with a bound on the error that float32 arithmetic may add to each output;
* `assert_close`, which applies that bound.

Where the bound comes from
--------------------------
With u = 2^-24, a dot product of n terms in float32, in any order that keeps at least eight partial sums (every tier
does), differs from the exact one by at most (n/8 + 16) u * sum|w x|. An `exact` kernel may also round activations to
int16 per block of 32 with the block's own scale amax / 32767, which adds at most amax / 65534 per element, hence
sum|w| amax_block / 65534. Both terms are carried through the activation with its Lipschitz constant, through the
second projection and through the weighted sum; the rounding of the result to its dtype comes on top. Nothing in it is
tuned: it is derived from norms of the very numbers of the case. (A bound: typical errors are ~10x smaller.)
Activation rules that round coarsely by contract (ds_fp4's FP8, q4_0's Q8_0 under `fast`) are emulated bit by bit;
where an intermediate lies within its own error of a rounding boundary, the bound allows that element the flip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

U32 = 2.0**-24  # half an ulp of float32, relative
INT16_STEP = 1.01 / 65534  # |x - round16(x)| <= amax / 65534, and the float32 rounding of the scale and its inverse
ACT_BLOCK = 32

# ------------------------------------------------------------------------------------------------------ decode tables


def e2m1_values() -> np.ndarray:
    """All 16 FP4 codes (sign, 2-bit exponent with bias 1, 1-bit mantissa; OCP MX v1.0 section 5.3.3)."""
    out = []
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        out.append(-magnitude if sign else magnitude)
    return np.array(out)


def e4m3_values() -> np.ndarray:
    """All 256 FP8 E4M3 codes (bias 7, no infinity, S.1111.111 is NaN; OCP OFP8 v1.0)."""
    out = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            magnitude = math.nan
        elif exponent == 0:
            magnitude = mantissa / 8 * 2.0**-6
        else:
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        out.append(-magnitude if sign else magnitude)
    return np.array(out)


def e8m0_values() -> np.ndarray:
    """All 256 scale bytes: 2^(byte - 127), byte 255 is NaN (OCP MX v1.0 section 5.4.1)."""
    return np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])


E2M1 = e2m1_values()
E4M3 = e4m3_values()
E8M0 = e8m0_values()


def as_bytes(t: Tensor) -> np.ndarray:
    """A one-byte tensor (uint8 or float8) as a uint8 array."""
    return t.detach().contiguous().view(torch.uint8).numpy()


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes to [..., 2n] codes, the low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def decode_mxfp4(packed: Tensor, scale: Tensor) -> np.ndarray:
    return E2M1[_nibbles(as_bytes(packed))] * np.repeat(E8M0[as_bytes(scale)], 32, axis=-1)


def decode_nvfp4(packed: Tensor, scale: Tensor, glob: Tensor) -> np.ndarray:
    blocks = np.repeat(E4M3[as_bytes(scale)], 16, axis=-1)
    return E2M1[_nibbles(as_bytes(packed))] * blocks * glob.double().numpy()[..., None]


def decode_fp8_block(codes: Tensor, scale: Tensor) -> np.ndarray:
    value = E4M3[as_bytes(codes)]
    rows, columns = value.shape[-2:]
    scales = np.repeat(np.repeat(scale.double().numpy(), 128, axis=-2), 128, axis=-1)
    return value * scales[..., :rows, :columns]


def decode_q4_0(blocks: Tensor) -> np.ndarray:
    """GGUF Q4_0: 18 bytes per 32 values: f16 d, then byte j holds elements j (low nibble) and j + 16 (high)."""
    raw = as_bytes(blocks)
    raw = raw.reshape(*raw.shape[:-1], -1, 18)
    d = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float64)
    q = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], axis=-1).astype(np.float64) - 8
    with np.errstate(invalid="ignore"):  # 0 * inf is NaN, as it should be
        return (q * d).reshape(*raw.shape[:-2], -1)


def decode_dense(values: Tensor) -> np.ndarray:
    return values.detach().double().numpy()


DECODERS: dict[str, Callable[..., np.ndarray]] = {
    "bf16": decode_dense,
    "f16": decode_dense,
    "f32": decode_dense,
    "mxfp4": decode_mxfp4,
    "nvfp4": decode_nvfp4,
    "ds_fp4": decode_mxfp4,
    "fp8_block": decode_fp8_block,
    "q4_0": decode_q4_0,
}


def decode(fmt: str, parts: list[Tensor]) -> Tensor:
    """The weights as float64 [E, R, C]."""
    return torch.from_numpy(DECODERS[fmt](*parts))


# --------------------------------------------------------------------------------------------------- round to nearest


def round_e2m1(x: np.ndarray) -> np.ndarray:
    """Nearest FP4 value, ties to the even mantissa, saturating at 6."""
    a = np.minimum(np.abs(x), 6.0)
    step = np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))
    return np.copysign(np.rint(a / step) * step, x)


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 value, ties to even, saturating at 448."""
    a = np.minimum(np.abs(x), 448.0)
    exponent = np.maximum(np.frexp(a)[1] - 1, -6)
    step = np.exp2(exponent - 3.0)
    return np.copysign(np.minimum(np.rint(a / step) * step, 448.0), x)


def _blocks(x: np.ndarray, n: int) -> np.ndarray:
    """[..., C] to [..., ceil(C/n), n], zero padded."""
    pad = -x.shape[-1] % n
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return x.reshape(*x.shape[:-1], -1, n)


def _unblocks(x: np.ndarray, columns: int) -> np.ndarray:
    return x.reshape(*x.shape[:-2], -1)[..., :columns]


def encode_mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """OCP MX v1.0 section 6.3: shared exponent floor(log2 amax) - 2, elements to nearest even, saturating.

    Returns (values as decoded, scale bytes [..., C/32]); bytes of all-zero blocks are -1: the rule does not fix them.
    """
    b = _blocks(w.astype(np.float64), 32)
    amax = np.abs(b).max(-1)
    exponent = np.clip(np.frexp(amax)[1] - 1 - 2, -127, 127)
    scale = np.exp2(exponent.astype(np.float64))[..., None]
    values = _unblocks(round_e2m1(b / scale) * scale, w.shape[-1])
    return values, np.where(amax > 0, exponent + 127, -1)


def encode_ds_fp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2^ceil(log2(amax / 6)), elements to nearest even (DeepSeek's fp4_act_quant rule). Returns as encode_mxfp4."""
    b = _blocks(w.astype(np.float64), 32)
    amax = np.abs(b).max(-1)
    mantissa, exponent = np.frexp(amax / 6)  # in [0.5, 1): ceil(log2) is exponent, or exponent - 1 at a power of two
    exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -127, 127)
    scale = np.exp2(exponent.astype(np.float64))[..., None]
    return _unblocks(round_e2m1(b / scale) * scale, w.shape[-1]), np.where(amax > 0, exponent + 127, -1)


# ---------------------------------------------------------------------------------------------- rules for activations


def pow2_ceil(x: np.ndarray) -> np.ndarray:
    """Smallest power of two >= x, for float32 x > 0."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.float64))


def fp8_activation(x: np.ndarray, amax: np.ndarray | None = None) -> np.ndarray:
    """DeepSeek's act_quant with round_scale: [..., n] to E4M3 per 128 values times a power-of-two scale.

    `amax` [..., ceil(n/128)] overrides the block maxima (to find out what a slightly different input would give).
    """
    b = _blocks(x.astype(np.float32), 128)
    top = np.abs(b).max(-1) if amax is None else amax.astype(np.float32)
    top = np.maximum(top, np.float32(1e-4))
    scale = pow2_ceil(top * np.float32(1 / 448))[..., None]
    return _unblocks(round_e4m3(b.astype(np.float64) / scale) * scale, x.shape[-1])


def q8_0_activation(x: np.ndarray, amax: np.ndarray | None = None) -> np.ndarray:
    """ggml's Q8_0: per 32 values d = amax / 127, q = roundf(x / d), d stored as f16 (f32 above f16's range)."""
    b = _blocks(x.astype(np.float32), 32)
    top = np.abs(b).max(-1) if amax is None else amax.astype(np.float32)
    d = (top / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0)).astype(np.float32)
        scaled = (b * inverse[..., None]).astype(np.float64)
        q = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)  # roundf: halves away from zero
        stored = np.where(d > 65504, d, d.astype(np.float16).astype(np.float32)).astype(np.float64)
    return _unblocks(q * stored[..., None], x.shape[-1])


_RULES = {"fp8": (fp8_activation, 128), "q8_0": (q8_0_activation, 32)}


def _rule(fmt: str, precision: str) -> str | None:
    if fmt == "ds_fp4":
        return "fp8"
    if fmt == "q4_0" and precision == "fast":
        return "q8_0"
    return None


def _apply_rule(name: str | None, x: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x by the named rule; the second result bounds what an error of `slack` in x can make of it."""
    if name is None:
        return x, slack
    rule, block = _RULES[name]
    v, s = x.numpy(), slack.numpy()
    lo = np.maximum(_blocks(np.abs(v) - s, block).max(-1), 0.0)
    hi = _blocks(np.abs(v) + s, block).max(-1)
    value = rule(v)
    spread = np.zeros_like(value)
    if s.any():
        for shifted in (v - s, v, v + s):
            for amax in (lo, hi):
                spread = np.maximum(spread, np.abs(rule(shifted, amax) - value))
    return torch.from_numpy(value), torch.from_numpy(spread)


# -------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Activation:
    """f(gate), its largest slope over an interval of half width d around gate, and the absolute error of f itself."""

    f: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    cancels: bool = False  # 0.5 x (1 + erf) loses the small result of a negative x to cancellation: |x| u


def _at_most(c: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda g, d: torch.full_like(g, c)


def _gelu(g: Tensor) -> Tensor:
    return 0.5 * g * torch.special.erfc(-g / math.sqrt(2))


def _gelu_tanh(g: Tensor) -> Tensor:
    z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return g * torch.sigmoid(2 * z)  # 0.5 (1 + tanh z), without its cancellation


def _activation(name: str, alpha: float) -> Activation:
    if name in ("silu", "swiglu_clamp"):
        return Activation(lambda g: g * torch.sigmoid(g), _at_most(1.1))
    if name == "swigluoai":
        return Activation(lambda g: g * torch.sigmoid(alpha * g), _at_most(1.1))
    if name == "gelu":
        return Activation(_gelu, _at_most(1.13), cancels=True)
    if name == "gelu_tanh":
        return Activation(_gelu_tanh, _at_most(1.13), cancels=True)
    if name == "relu2":
        return Activation(lambda g: g.clamp(min=0) ** 2, lambda g, d: 2 * (g.abs() + d))
    raise KeyError(name)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglu_clamp")


def activate(
    name: str,
    gate: Tensor,
    up: Tensor,
    *,
    alpha: float = 1.702,
    limit: float | None = None,
    gate_slack: Tensor | None = None,
    up_slack: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """act(gate) * up in float64, and a bound on its error when gate and up carry errors of at most their slacks."""
    d = torch.zeros_like(gate) if gate_slack is None else gate_slack
    e = torch.zeros_like(up) if up_slack is None else up_slack
    if limit is not None:  # clamps are 1-Lipschitz: slacks stay valid
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    if name == "swigluoai":
        up = up + 1
    act = _activation(name, alpha)
    f = act.f(gate)
    # f in float32: a few ulp of exp and the division, and what underflows.
    own = 2.0**-20 * f.abs() + 1e-36 + (2.0**-22 * gate.abs() if act.cancels else 0.0)
    f_slack = act.slope(gate, d) * d + own
    value = f * up
    return value, f_slack * (up.abs() + e) + f.abs() * (e + 2.0**-22 * up.abs()) + 1e-37


# -------------------------------------------------------------------------------------------------------------- layer


@dataclass
class Reference:
    value: Tensor  # [M, H] float64
    bound: Tensor  # [M, H] float64: error allowed before the rounding to the result's dtype


def _project(w: Tensor, x: Tensor, slack: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """x [n, C] times w [R, C] transposed, and the bound of the module docstring."""
    n = x.shape[-1]
    absw = w.abs().T
    pad = -n % ACT_BLOCK
    blocks = torch.nn.functional.pad(x.abs() + slack, (0, pad)).reshape(x.shape[0], -1, ACT_BLOCK)
    amax = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(x.shape[0], -1)[:, :n]
    per_element = slack + step * amax + (n / 8 + 16) * U32 * (x.abs() + slack)
    # float32 subnormals: what an activation or a product below the normal range may lose
    return x @ w.T, per_element @ absw + n * 2.0**-149


def experts(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1,
    w2,
    *,
    format: str,
    down_format: str | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
    apply_router_weight_on_input: bool = False,
    precision: str = "exact",
) -> Reference:
    """cpu_moe::experts in float64. w1[e] [2I, H] and w2[e] [H, I] are float64 weights; only used experts are read."""
    tokens, width = hidden.shape
    x_all = hidden.detach().double()
    p_all = weights.detach().double()
    value = torch.zeros(tokens, width, dtype=torch.float64)
    bound = torch.zeros_like(value)
    first = _rule(format, precision)
    second = _rule(down_format or format, precision)
    # `fast` may use int8 blocks wherever it likes; q4_0's are emulated, other formats get int8's step.
    steps = [
        1 / 254 if precision == "fast" and fmt != "q4_0" else INT16_STEP for fmt in (format, down_format or format)
    ]
    for e in sorted(set(ids.flatten().tolist())):
        if e < 0:
            continue
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        x, p = x_all[token], p_all[token, slot][:, None]
        if apply_router_weight_on_input:
            x = (x.float() * p.float()).double()  # float32, for the rules that round; U32 is inside the bound
        x, slack = _apply_rule(first, x, torch.zeros_like(x))
        g, g_slack = _project(w1[e], x, slack, steps[0])
        if gate_up_bias is not None:
            b = gate_up_bias[e].detach().double()
            g, g_slack = g + b, g_slack + 2 * U32 * b.abs()
        if interleaved:
            halves = g[:, 0::2], g[:, 1::2], g_slack[:, 0::2], g_slack[:, 1::2]
        else:
            i = g.shape[1] // 2
            halves = g[:, :i], g[:, i:], g_slack[:, :i], g_slack[:, i:]
        h, h_slack = activate(
            activation,
            halves[0],
            halves[1],
            alpha=alpha,
            limit=limit,
            gate_slack=halves[2],
            up_slack=halves[3],
        )
        h, h_slack = _apply_rule(second, h, h_slack)
        y, y_slack = _project(w2[e], h, h_slack, steps[1])
        if down_bias is not None:
            b = down_bias[e].detach().double()
            y, y_slack = y + b, y_slack + 2 * U32 * b.abs()
        if apply_router_weight_on_input:
            p = torch.ones_like(p)
        value.index_add_(0, token, p * y)
        bound.index_add_(0, token, p.abs() * (y_slack + (ids.shape[1] + 3) * U32 * y.abs()))
    return Reference(value, bound)


# Rounding of the result: half an ulp, doubled because the value that is rounded is itself off by the bound.
RESULT_EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
RESULT_TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-148}


def assert_close(got: Tensor, ref: Reference, what: str = "") -> None:
    """Every element within the bound; NaN where the reference is NaN, and finite or infinite as it is."""
    assert got.shape == ref.value.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(ref.value.shape)}"
    top = torch.finfo(got.dtype).max
    out, want = got.detach().double(), ref.value
    tolerance = ref.bound + RESULT_EPS[got.dtype] * want.abs() + RESULT_TINY[got.dtype]
    nan = want.isnan()
    assert out[nan].isnan().all(), f"{what}: {int((~out[nan].isnan()).sum())} elements should be NaN"
    assert not out[~nan].isnan().any(), f"{what}: {int(out[~nan].isnan().sum())} unexpected NaN"
    surely_inf = ~nan & (want.abs() - tolerance > top)
    assert (out[surely_inf] == torch.copysign(torch.tensor(math.inf).double(), want[surely_inf])).all(), what
    inside = ~nan & (want.abs() + tolerance < top)
    excess = ((out - want).abs() - tolerance)[inside]
    if excess.numel() and not bool((excess <= 0).all()):
        index = tuple(int(i[0]) for i in torch.nonzero(inside & ~((out - want).abs() <= tolerance), as_tuple=True))
        raise AssertionError(
            f"{what}: {int((~(excess <= 0)).sum())} of {excess.numel()} elements out of bound, first at {index}: got "
            f"{out[index].item():.9g}, expected {want[index].item():.9g} +- {tolerance[index].item():.3g}"
        )


def assert_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """The same bits (NaN equals NaN of the same payload, 0 differs from -0)."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
    x, y = (t.detach().contiguous().view(torch.uint8) for t in (a, b))
    assert torch.equal(x, y), f"{what}: {int((x != y).sum())} of {x.numel()} bytes differ"
