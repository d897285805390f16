"""Every code and every scale of every format, in every position, through the kernels themselves, on every tier.

`Probe` makes the layer a lens: the first projection is f32 and picks one intermediate element per token, so the result
of token t is the column t of `down` times a known number: a wrong nibble order, scale or position shows by its place.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from formats import FORMATS, Bank, Parts, make_bank, make_inputs, ops, pack_nibbles, q4_0_parts, rng
from reference import assert_bits
from torch import Tensor

INF, NAN = math.inf, math.nan


def probe(name: str, down: Parts, columns: list[int] | None = None, gain: float = 1.0, at: Any = None) -> Tensor:
    """[len(columns), R]: each chosen column of down[0] times gain, checked against the reference.

    relu2 with gate 1 and up `gain` makes the intermediate exactly gain * one-hot.
    """
    bank = Bank(FORMATS["f32"], [], down, FORMATS[name], {"activation": "relu2"})
    rows, c = bank.w2.shape[1:]
    columns = list(range(c)) if columns is None else columns
    out = []
    for chunk in (columns[n : n + rows] for n in range(0, len(columns), rows)):
        w1 = torch.zeros(1, 2 * c, rows)
        w1[0, chunk, range(len(chunk))] = 1
        w1[0, [c + j for j in chunk], range(len(chunk))] = gain
        bank.gate_up = [w1]
        bank.__dict__.pop("w1", None)
        tokens = len(chunk)
        args = torch.eye(rows)[:tokens], torch.zeros(tokens, 1).long(), torch.ones(tokens, 1)
        out.append(bank.check(*args, what=f"{name} x {gain} at column {chunk[0]} on {at}"))
    return torch.cat(out)


def probe_up(name: str, up: Parts, what: str) -> Tensor:
    """The same lens in front: token t puts 1 into column t of `up` [1, C, C] (every format has C = rows here).

    The gate rows are zero with bias 2 (silu), down is the identity in f32.
    """
    f = FORMATS[name]
    rows, c = f.decode(up).shape[1:]
    zeros = f.ints(torch.zeros(1, rows, c))
    both: Parts = []
    for z, p in zip(zeros, up, strict=True):
        joined = [z.view(torch.uint8), p.view(torch.uint8)] if p.element_size() == 1 else [z.to(p.dtype), p]
        both.append(torch.cat(joined, 1).view(p.dtype))
    bias = torch.zeros(1, 2 * rows)
    bias[:, :rows] = 2
    down = torch.zeros(1, c, rows)
    n = min(c, rows)
    down[0, range(n), range(n)] = 1
    bank = Bank(f, both, [down], FORMATS["f32"], {"gate_up_bias": bias})
    return bank.check(torch.eye(c), torch.zeros(c, 1).long(), torch.ones(c, 1), what=what)


def fp4(name: str, codes: Tensor, scale: Tensor | None = None, glob: Tensor | None = None) -> Parts:
    """codes [R, C] (0..15) and scale bytes [R, C/block] to a one-expert bank (scale 1 by default)."""
    r, c = codes.shape
    n = c // FORMATS[name].block
    packed = pack_nibbles(codes.to(torch.uint8))[None]
    if name == "nvfp4":
        scale = torch.full((r, n), 0x38) if scale is None else scale
        glob = torch.ones(r) if glob is None else glob
        return [packed, scale.to(torch.uint8).view(torch.float8_e4m3fn)[None], glob[None]]
    scale = torch.full((r, n), 127) if scale is None else scale
    return [packed, scale.to(torch.uint8)[None]]


FP4 = ["mxfp4", "nvfp4", "ds_fp4"]


def grid(r: int, c: int) -> tuple[Tensor, Tensor]:
    return torch.arange(r)[:, None], torch.arange(c)[None]


# -------------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("name", FP4)
def test_fp4_codes_in_every_position(name: str, tier: str) -> None:
    """NUM-03: all 16 codes in all positions of three blocks; row r holds code (r + c) mod 16 in column c."""
    r, c = grid(96, 96)
    parts = fp4(name, (r + c) % 16)
    out = probe(name, parts, at=tier)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.allclose(out, table[(r + c) % 16].T, rtol=1e-4, atol=1e-4)  # by hand as well
    probe_up(name, parts, f"{name} up on {tier}")


def test_q4_0_codes_in_every_position(tier: str) -> None:
    """All 16 nibbles in all 32 positions: byte j holds elements j (low) and j + 16 (high)."""
    r, c = grid(96, 96)
    q = ((r + c) % 16).reshape(1, 96, 3, 2, 16).to(torch.uint8)
    parts = q4_0_parts(torch.ones(1, 96, 3).half(), q[..., 0, :] | q[..., 1, :] << 4)
    out = probe("q4_0", parts, at=tier)
    assert torch.allclose(out, ((r + c) % 16 - 8).T.float(), rtol=1e-4, atol=1e-4)
    probe_up("q4_0", parts, f"q4_0 up on {tier}")


def test_fp8_codes_in_every_position(tier: str) -> None:
    """NUM-02: all 254 finite codes in all residues of a 128-block, across four scale blocks of powers of two."""
    codes = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F])
    r, c = grid(254, 254)
    scale = torch.tensor([[[1.0, 2.0], [0.25, 8.0]]])
    parts = [codes[(r + c) % 254].to(torch.uint8)[None].view(torch.float8_e4m3fn), scale]
    out = probe("fp8_block", parts, columns=list(range(0, 254, 3)), at=tier)
    table = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    want = table[(r + c) % 254] * scale[0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:254, :254]
    assert torch.allclose(out, want.T[::3], rtol=1e-4, atol=5e-2)
    probe_up("fp8_block", [parts[0], torch.ones(1, 2, 2)], f"fp8 up on {tier}")


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_half_codes(half: str, tier: str) -> None:
    """All finite 16-bit patterns of the dense formats, subnormals included, through one column each."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[half]
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    w = torch.zeros(65536, dtype=dtype)
    w[: every.numel()] = every
    parts = [w.reshape(1, 1024, 64)]
    for gain in (1.0, 2.0**-8):
        probe(half, parts, gain=gain, at=tier)


# ------------------------------------------------------------------------------------------------------------- scales


def scale_rows(n: int) -> Tensor:
    """[256, n] bytes: row r holds 256 scales r, r + 64, ...: every byte in every one of the n block positions."""
    r, b = grid(256, n)
    return (r + 64 * b) % 256


@pytest.mark.parametrize("name", ["mxfp4", "ds_fp4"])
@pytest.mark.parametrize("gain", [1.0, 2.0**20, 2.0**-20])
def test_e8m0_scales(name: str, gain: float, tier: str) -> None:
    """NUM-01: all 256 bytes in four block positions: 0 is 2^-127, 254 is 2^127 (finite beside small activations).

    255 is NaN for the rows that hold it (every token reads the whole row) and for no other row.
    """
    g = rng(3)
    parts = fp4(name, torch.randint(0, 16, (256, 128), generator=g), scale_rows(4))
    out = probe(name, parts, columns=list(range(0, 128, 5)), gain=gain, at=tier)
    nan_rows = (scale_rows(4) == 255).any(1)
    assert torch.equal(out.isnan().any(0), nan_rows) and torch.equal(out.isnan().all(0), nan_rows)
    if gain > 1:  # byte 0 gives normal numbers here
        six = probe(name, fp4(name, torch.full((64, 64), 7), torch.zeros(64, 2)), [0, 40], gain, tier)
        assert torch.allclose(six, torch.tensor(6 * 2.0**-127 * gain), rtol=1e-4)
    if gain < 1:  # 6 * 2^127 alone is out of float32, times 2^-20 it is not
        top = probe(name, fp4(name, torch.full((64, 64), 7), torch.full((64, 2), 254)), [0, 40], gain, tier)
        assert torch.allclose(top.double(), torch.tensor(6 * 2.0**127 * gain).double(), rtol=1e-4)


@pytest.mark.parametrize("name", ["mxfp4", "ds_fp4"])
def test_e8m0_extremes_in_front(name: str, tier: str) -> None:
    """Scales 2^-127 and 2^127 in gate_up against activations that bring the product back into range."""
    for byte, x in ((0, 2.0**100), (254, 2.0**-125), (254, 2.0**-110), (1, 2.0**126), (200, 2.0**-80)):
        parts = fp4(name, torch.full((64, 32), 7), torch.full((64, 1), byte))
        bank = Bank(FORMATS[name], parts, [torch.eye(32)[None]], FORMATS["f32"], {"activation": "relu2"})
        bank.kwargs["gate_up_bias"] = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)
        bank.gate_up[0] = bank.gate_up[0].clone()
        bank.gate_up[0][:, :32] = 0  # gate rows are zero: the gate is its bias
        hidden = torch.zeros(3, 32)
        hidden[0, 3], hidden[1, 30], hidden[2] = x, -x, x / 32
        bank.check(hidden, torch.zeros(3, 1).long(), torch.ones(3, 1), what=f"{name} byte {byte}, x {x} on {tier}")


def test_zero_activation_beside_huge_scale(tier: str) -> None:
    """Nothing becomes inf * 0: a block of zero activations or zero codes under the scale 2^127 contributes nothing."""
    codes = torch.full((64, 64), 7)
    codes[:, 32:] = 0
    scale = torch.tensor([[254, 254]]).expand(64, 2)
    for name in ("mxfp4", "ds_fp4"):
        parts = fp4(name, codes, scale)
        out = probe(name, parts, columns=[40, 63], at=tier)
        assert (out == 0).all()
        out = probe(name, parts, columns=[40, 63], gain=1e30, at=tier)
        assert (out == 0).all()


@pytest.mark.parametrize("gain", [1.0, 2.0**-30])
def test_nvfp4_scales(gain: float, tier: str) -> None:
    """All 256 block scales (negative, zero, subnormal, NaN) in eight positions, times globals of many magnitudes."""
    g = rng(4)
    glob = torch.exp2(torch.randint(-60, 60, (256,), generator=g).float()) * (1 + torch.rand(256, generator=g))
    parts = fp4(
        "nvfp4",
        torch.randint(0, 16, (256, 128), generator=g),
        (grid(256, 8)[0] + 32 * grid(256, 8)[1]) % 256,
        glob,
    )
    out = probe("nvfp4", parts, columns=list(range(0, 128, 5)), gain=gain, at=tier)
    nan_rows = parts[1].float().isnan().any(-1)[0]
    assert nan_rows.sum() == 8 and torch.equal(out.isnan().all(0), nan_rows)
    assert torch.equal(out.isnan().any(0), nan_rows)


def test_nvfp4_scale_by_hand(tier: str) -> None:
    """Code 1.0 under each scale byte: the byte's own value, sign and all, in the right rows."""
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F])
    parts = fp4("nvfp4", torch.full((254, 16), 2), finite[:, None])
    out = probe("nvfp4", parts, columns=[0, 15], at=tier)
    want = finite.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.allclose(out, want.expand(2, 254), rtol=1e-4, atol=0)
    up = fp4("nvfp4", torch.full((254, 16), 2), finite[:, None])
    probe_up("nvfp4", up, f"nvfp4 scale bytes up on {tier}")


@pytest.mark.parametrize("glob", [2.0**-126, 2.0**-130, 2.0**-149, 2.0**120, 0.0, -1.5, INF, NAN, 3.0e38])
def test_nvfp4_global_extremes(glob: float, tier: str) -> None:
    codes = torch.randint(0, 16, (48, 48), generator=rng(5))
    codes[codes % 8 == 0] = 2
    for byte in (0x01, 0x38, 0x7E, 0xFE):
        every = fp4("nvfp4", codes, torch.full((48, 3), byte), torch.where(torch.arange(48) == 7, glob, 1.0))
        for gain in (1.0, 2.0**-9, 2.0**9):
            out = bank_rows("nvfp4", every, gain, tier)
            assert out[:, [r for r in range(48) if r != 7]].isfinite().all()
            if not math.isfinite(glob):
                assert not out[:, 7].isfinite().any()


def bank_rows(name: str, parts: Parts, gain: float, tier: str) -> Tensor:
    """probe() of a few columns, for banks whose non-finite rows have no agreed value: only finite rows are checked."""
    w = FORMATS[name].decode(parts)
    ok = w.isfinite().all(-1)[0]
    bank = Bank(FORMATS["f32"], [], parts, FORMATS[name], {"activation": "relu2"})
    rows, c = w.shape[1:]
    w1 = torch.zeros(1, 2 * c, rows)
    picks = [0, c // 2, c - 1]
    w1[0, picks, range(3)] = 1
    w1[0, [c + j for j in picks], range(3)] = gain
    bank.gate_up = [w1]
    args = torch.eye(rows)[:3], torch.zeros(3, 1).long(), torch.ones(3, 1)
    out = bank(*args)
    ref = bank.reference(*args)
    ref.value, ref.bound = ref.value[:, ok], ref.bound[:, ok]
    from reference import assert_close

    assert_close(out[:, ok], ref, f"{name} x {gain} on {tier}")
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scale_values(dtype: torch.dtype, tier: str) -> None:
    """Block scales of every magnitude and sign; inf and NaN stay in their 128 rows."""
    values = [1.0, -2.0, 0.0, 2.0**-126, 1e-30, 1e30, 2.0**-140, INF, NAN]
    scale = torch.tensor(values).reshape(1, 9, 1).to(dtype)
    codes = torch.randint(1, 0x7F, (1, 9 * 128, 64), generator=rng(6), dtype=torch.int32).to(torch.uint8)
    parts = [codes.view(torch.float8_e4m3fn), scale]
    for gain in (1.0, 2.0**-20, 2.0**10):
        out = bank_rows("fp8_block", parts, gain, tier)
        assert out[:, : 7 * 128].isfinite().all()
        assert not out[:, 7 * 128 :].isfinite().any()


def test_q4_0_every_f16_scale(tier: str) -> None:
    """NUM-10: all 65536 patterns of d, each in one block: subnormals, -0, and the NaNs in their own rows only."""
    e, rows, blocks = 16, 64, 64
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    patterns = torch.where(patterns.isinf(), 0, patterns).reshape(e, rows, blocks)  # inf: the next test
    nibbles = torch.randint(0, 256, (e, rows, blocks, 16), generator=rng(7), dtype=torch.int32).to(torch.uint8)
    parts = q4_0_parts(patterns, nibbles)
    i = blocks * 32
    w1 = torch.zeros(1, 2 * i, rows)
    place = [32 * b + (7 * b) % 32 for b in range(blocks)]  # token b looks at one position of block b
    w1[0, place, range(blocks)] = 1
    w1[0, [i + p for p in place], range(blocks)] = 64.0
    bank = Bank(FORMATS["f32"], [w1.expand(e, 2 * i, rows)], parts, FORMATS["q4_0"], {"activation": "relu2"})
    hidden = torch.eye(rows).repeat(e, 1)
    ids = torch.arange(e).repeat_interleave(rows)[:, None]
    out = bank.check(hidden, ids, torch.ones(e * rows, 1), what=f"q4_0 d on {tier}")
    nan_rows = patterns.isnan().any(-1)  # [e, rows]
    assert torch.equal(out.reshape(e, rows, rows).isnan().all(1), nan_rows)


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_q4_0_bad_scales_stay_in_their_rows(precision: str, tier: str) -> None:
    for bits in (0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x03FF, 0x8000, 0x0001, 0x7BFF):
        bank = make_bank("q4_0", 2, 64, 96, seed=bits)
        args = make_inputs(3, 64, 1, 1, dtype=torch.float32)
        clean = bank(*args, precision=precision)
        for row, block in ((5, 0), (40, 2)):
            bank.down[0][0, row, block * 18 : block * 18 + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
        bank.__dict__.pop("w2", None)
        out = bank(*args, precision=precision)
        others = [r for r in range(64) if r not in (5, 40)]
        assert_bits(out[:, others], clean[:, others], hex(bits))
        bad = bits & 0x7C00 == 0x7C00
        assert out[:, [5, 40]].isfinite().all().item() is not bad
        if not bad:
            bank.check(*args, precision=precision)


# ---------------------------------------------------------------------------------------- NaN codes, huge activations


def test_fp8_nan_codes_hit_their_rows(tier: str) -> None:
    """0x7F and 0xFF at every column residue: that row is NaN for every token, no other row is."""
    bank = make_bank("fp8_block", 1, 257, 131)
    codes = bank.down[0].view(torch.uint8)
    rows = list(range(0, 257, 2))
    for n, row in enumerate(rows):
        codes[0, row, n] = 0x7F if n % 2 else 0xFF
    out = bank.check(*make_inputs(3, 257, 1, 1, dtype=torch.float32), what=tier)
    assert torch.equal(out.isnan().all(0), torch.isin(torch.arange(257), torch.tensor(rows)))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_in_gate_up_is_seen(name: str, tier: str) -> None:
    """A NaN in one expert reaches exactly the tokens routed to it."""
    f = FORMATS[name]
    bank = make_bank(name, 3, 64, 64)
    f.poison(bank.gate_up, 1)
    ids = torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1]])
    out = bank(make_inputs(4, 64, 2, 3)[0], ids, torch.ones(4, 2))
    assert out.isnan().all(1).tolist() == [False, True, False, True] and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_hidden_stays_in_its_token(name: str, bad: float, tier: str) -> None:
    bank = make_bank(name, 3, 64, 64)
    hidden, ids, weights = make_inputs(5, 64, 2, 3)
    clean = bank(hidden, ids, weights)
    hidden[2, 37] = bad
    out = bank(hidden, ids, weights)
    others = [0, 1, 3, 4]
    assert_bits(out[others], clean[others])
    if math.isnan(bad):
        assert out[2].isnan().all()
    else:
        assert not out[2].isfinite().all()


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", FORMATS)
def test_huge_and_tiny_activations(name: str, precision: str, tier: str) -> None:
    """NUM-10: no 16-bit float inside: 1e5 .. 1e30 and 1e-30 in, intermediates beyond 65504: finite where exact is."""
    bank = make_bank(name, 3, 64, 64)
    hidden, ids, weights = make_inputs(4, 64, 2, 3, dtype=torch.float32)
    for scale in (1e5, 1e10, 1e15, 1e-10):
        bank.check(hidden * scale, ids, weights, precision=precision, what=f"{name} x {scale} on {tier}")
    for scale in (1e5, 1e30, 1e-30):  # clamped: finite whatever comes in
        out = bank.check(
            hidden * scale,
            ids,
            weights,
            precision=precision,
            activation="swigluoai",
            limit=7.0,
            what=f"{scale} {tier}",
        )
        assert out.isfinite().all()
    big = hidden.bfloat16() * 1e30
    out = bank.check(big, ids, weights, precision=precision, activation="swigluoai", limit=7.0)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_subnormals(name: str, tier: str) -> None:
    """NUM-16: activations and weights at float32's lower end; a torch-wide flush mode changes nothing."""
    bank = make_bank(name, 3, 64, 64, activation="relu2")
    bank.kwargs["gate_up_bias"] = torch.cat([torch.ones(3, 64), torch.zeros(3, 64)], 1)
    hidden, ids, weights = make_inputs(4, 64, 2, 3, dtype=torch.float32)
    for scale in (1e-36, 1e-39, 2.0**-140):
        args = hidden * scale, ids, weights * 1e30  # before the mode changes: it changes torch's own products
        plain = bank(*args)
        assert torch.set_flush_denormal(True)
        try:
            flushed = bank(*args)
        finally:
            torch.set_flush_denormal(False)
        assert_bits(flushed, plain, f"{name} x {scale} on {tier}")
    bank.check(hidden * 1e-33, ids, weights * 1e30, what=f"{name} on {tier}")


# -------------------------------------------------------------------------------------------------- dequantize agrees


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_extremes(name: str, tier: str) -> None:
    """dequantize decodes the same extremes to float32's own rounding: inf only where the value is out of range."""
    g = rng(8)
    parts = FORMATS[name].make(g, 2, 40, 96)
    if name in ("mxfp4", "ds_fp4"):
        parts[1] = torch.randint(0, 256, parts[1].shape, generator=g, dtype=torch.int32).to(torch.uint8)
    if name == "nvfp4":
        parts[1] = (
            torch.randint(0, 256, parts[1].shape, generator=g, dtype=torch.int32)
            .to(torch.uint8)
            .view(torch.float8_e4m3fn)
        )
    if name.startswith("fp8_block"):
        parts[0] = (
            torch.randint(0, 256, parts[0].shape, generator=g, dtype=torch.int32)
            .to(torch.uint8)
            .view(torch.float8_e4m3fn)
        )
    out = ops.dequantize(parts, FORMATS[name].name, dtype=torch.float32)
    want = FORMATS[name].decode(parts)
    if name == "nvfp4":  # two float32 products: (code * scale) is exact, times global rounds once
        torch.testing.assert_close(out.double(), want.float().double(), rtol=2.0**-23, atol=0, equal_nan=True)
    else:
        assert torch.equal(out.nan_to_num(nan=1.25e-7), want.float().nan_to_num(nan=1.25e-7))
