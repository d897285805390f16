"""Scales and activations at the ends of their ranges: nothing overflows or vanishes before the product itself does
(NUM-01, DESIGN 3), and what one token needs changes neither another's bits nor the time of all."""

from __future__ import annotations

import pytest
import torch
from formats import NAMES, make_bank, make_inputs, ops
from reference import assert_bits, decode
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def down_only(name: str, parts: list[Tensor], x: Tensor) -> Tensor:
    """[T, R]: x [T, C] times the weight [1, R, C] by the kernel of `down`, to which relu(1)^2 * x brings x exactly."""
    (tokens, columns), rows = x.shape, parts[0].shape[1]
    gate_up = torch.zeros(1, 2 * columns, rows)
    gate_up[0, :columns, :tokens] = 1.0
    gate_up[0, columns:, :tokens] = x.T
    one, ids = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64)
    out: Tensor = ops.experts(
        torch.eye(tokens, rows), ids, one, [gate_up], parts, "f32", down_format=name, activation="relu2"
    )
    return out


def mx(scales: list[int], code: int = 0x22) -> list[Tensor]:
    """Four rows of 32 * len(scales) columns, all of one code (2: the value 1), each block with its scale byte."""
    row = torch.tensor(scales, dtype=torch.uint8)
    return [torch.full((1, 4, 16 * len(scales)), code, dtype=torch.uint8), row.repeat(1, 4, 1)]


def blocks(*values: float, size: int = 32) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(size)[None]


def check(name: str, parts: list[Tensor], x: Tensor) -> None:
    want = x.double() @ decode(name, parts)[0].double().T
    got = down_only(name, parts, x).double()
    step = 2**-12 * want.abs() + 2.0**-149
    assert ((got - want).abs() <= step).all(), f"got {got}, want {want}"


@pytest.mark.parametrize(
    ("scales", "values"),
    [
        ([0, 127], (2.0**100, 1e-20)),  # code 0 is 2^-127, and decides here
        ([0, 127], (2.0**60, 1e-22)),
        ([1, 127], (2.0**60, 1e-22)),
        ([22, 127], (2.0**40, 2.0**-60)),  # around where the ordinary pass begins
        ([24, 127], (2.0**40, 2.0**-60)),
        ([0, 0], (1.0, 1.0)),
        ([0, 0], (2.0**-20, 2.0**-20)),
        ([254, 0], (2.0**-125, 0.0)),
        ([254, 127], (0.0, 1.0)),  # 0 * 2^127 is 0
        ([254, 254], (0.0, 0.0)),
        ([200, 10], (2.0**-100, 2.0**100)),
    ],
)
def test_e8m0_scales(scales: list[int], values: tuple[float, ...], tier: str) -> None:
    check("mxfp4", mx(scales), blocks(*values))


@pytest.mark.parametrize(
    ("scale", "value", "code"),
    [
        (2.0**126, 4.0, 0x00),
        (2.0**100, 2.0**29, 0x00),
        (2.0**100, 2.0**29, 0x01),
        (2.0**120, 256.0, 0x01),
        (2.0**-120, 2.0**-20, 0x7E),
        (2.0**-126, 2.0**-10, 0x7E),
        (-(2.0**126), 4.0, 0x80),
    ],
)
def test_fp8_block_scales(scale: float, value: float, code: int, tier: str) -> None:
    codes = torch.zeros(1, 4, 256, dtype=torch.uint8)
    codes[..., 0], codes[..., 200] = code, 0x38
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 200] = value, 1e-3
    check("fp8_block", [codes.view(E4M3), torch.tensor([[[scale, 1.0]]])], x)


def test_q4_0_scale_times_the_largest_activations(tier: str) -> None:
    block = torch.full((1, 4, 18), 0x88, dtype=torch.uint8)  # every nibble 8: zeros
    block[..., :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    check("q4_0", [block], blocks(2.0**127))


# ds_fp4 has a floor of 1e-4 for its activations, by DeepSeek's own rule.
@pytest.mark.parametrize(
    ("fmt", "exponent"),
    [(f, e) for f in NAMES for e in (-148, -140, -130, -120, -100, 100, 120) if f != "ds_fp4" or e > 0],
)
def test_small_and_large_tokens(fmt: str, exponent: int, tier: str) -> None:
    """Against sum |w * x|, down to where float32 itself has no bits left."""
    columns = 256
    bank = make_bank(fmt, 1, 64, columns)
    x = torch.ldexp(torch.rand(2, columns, generator=torch.Generator().manual_seed(3)) + 1, torch.tensor(exponent))
    weight = decode(fmt, bank.down)[0].double()
    want, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    got = down_only(fmt, bank.down, x).double()
    if size.max() < torch.finfo(torch.float32).max / 4:
        step = (2**-4 if fmt == "ds_fp4" else 2**-12) * size + columns * 2.0**-149
        assert ((got - want).abs() <= step).all(), ((got - want).abs() / size).max()


# As above, and ds_fp4 rounds with one scale for 128 values.
# The 4-bit formats hold a block's activations to 2^-30 of its largest, so only other blocks are their affair.
@pytest.mark.parametrize(
    ("fmt", "where"),
    [(f, "another block") for f in NAMES if f != "ds_fp4"] + [(f, "its block") for f in ("bf16", "f32", "fp8_block")],
)
@pytest.mark.parametrize("apart", [80, 110, 118, 130, 150, 155, 170, 200, 240])
def test_small_activations_where_the_large_ones_meet_weights_of_zero(
    fmt: str, apart: int, where: str, tier: str
) -> None:
    """Nothing else hides them, so they must come through, however far below the largest they are."""
    columns = 256
    block = 1 if where == "its block" else 128 if fmt == "fp8_block" else 32
    parts = [part.clone() for part in make_bank(fmt, 1, 64, columns).down]
    codes = parts[0].view(torch.uint8)
    if fmt == "q4_0":
        codes[..., 2:18] = 0x88
    else:
        codes[..., : block * codes.shape[-1] // columns] = 0
    small = torch.rand(2, columns, generator=torch.Generator().manual_seed(5)) + 1
    small[:, :block] = 0
    x = torch.ldexp(small, torch.tensor(100 - apart))
    x[:, 0] = 2.0**100
    weight = decode(fmt, parts)[0].double()
    want, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    got = down_only(fmt, parts, x).double()
    step = 2**-12 * size + columns * 2.0**-149
    assert ((got - want).abs() <= step).all(), ((got - want).abs() / size).max()


@pytest.mark.parametrize("special", ["zero", "tiny", "huge", "outlier", "nan", "infinite"])
def test_a_token_keeps_its_bits_beside_a_special_one(fmt: str, special: str, tier: str) -> None:
    """In every place beside it, whatever path the special one takes."""
    bank = make_bank(fmt, 2, 64, 128)
    hidden, ids, weights = make_inputs(5, 64, 1, 2)
    hidden, ids = hidden.float(), torch.zeros_like(ids)
    alone = torch.cat([bank(hidden[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(5)])
    for place in range(5):
        mixed = hidden.clone()
        value = {"tiny": 1e-30, "huge": 1e30, "nan": float("nan"), "infinite": float("inf")}.get(special, 0.0)
        if special == "outlier":
            mixed[place, 7] = 3e4
        elif special in ("nan", "infinite"):
            mixed[place, 7] = value
        else:
            mixed[place] = value
        out = bank(mixed, ids, weights)
        others = [t for t in range(5) if t != place]
        assert_bits(out[others], alone[others], f"{special} at {place}")
        if special == "nan":
            assert out[place].isnan().all()


def test_mixed_scale_ranges_in_one_row(tier: str) -> None:
    """The same token alone and beside an all-zero one: the row's careful pass is each token's own affair."""
    x = torch.cat([blocks(2.0**60, 1e-22), blocks(0.0, 0.0), blocks(1.0, 1.0)])
    together = down_only("mxfp4", mx([0, 127]), x)
    for t in range(3):
        assert_bits(down_only("mxfp4", mx([0, 127]), x[t : t + 1]), together[t : t + 1])


@pytest.mark.parametrize("name", ["mxfp4", "ds_fp4", "nvfp4", "q4_0"])
def test_the_end_of_a_row_is_nothing_special(name: str, tier: str) -> None:
    """A row that fills no whole group of blocks has the bits of one with blocks of zeros behind it: its end must not
    pass for a row of extreme scales, which is summed in double, ten times slower (gpt-oss has rows of 2880)."""
    columns, padded = 320, 512
    bank = make_bank(name, 1, 64, columns)
    longer = []
    for part in bank.down:
        if part.dim() < 3:
            longer.append(part)
            continue
        row = part.view(torch.uint8)
        scales = row.shape[-1] < columns // 8  # the other parts hold codes
        beyond = row[..., -1:] if scales else torch.zeros_like(row[..., -1:])
        end = row.shape[-1] * (padded - columns) // columns
        longer.append(torch.cat([row, beyond.expand(*row.shape[:-1], end)], -1).view(part.dtype))
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(3))
    want = down_only(name, longer, torch.nn.functional.pad(x, (0, padded - columns)))
    assert_bits(down_only(name, bank.down, x), want)


def test_nan_scale_beside_zero_activations(tier: str) -> None:
    assert down_only("mxfp4", mx([127, 255]), blocks(1.0, 0.0)).isnan().all()


def test_relu2_overflows_only_with_its_product(tier: str) -> None:
    gate_up = torch.zeros(1, 64, 32)
    gate_up[0, :32, 0], gate_up[0, 32:, 0] = 1e20, 1e-15
    out = ops.experts(
        torch.eye(1, 32), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), [gate_up],
        [torch.eye(32)[None].contiguous()], "f32", activation="relu2",
    )  # fmt: skip
    torch.testing.assert_close(out, torch.full((1, 32), 1e25))


def test_nvfp4_of_the_smallest_numbers_is_not_nan() -> None:
    w = torch.zeros(1, 4, 32)
    w[0, 0, 0] = 1e-42
    assert ops.dequantize(ops.quantize(w, "nvfp4"), "nvfp4", dtype=torch.float32).isfinite().all()
