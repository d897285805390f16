"""quantize and dequantize against gguf, transformers, torch and the references' own rules."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import reference
import torch
from formats import FORMATS, NAMES, ops, place, rng, spread
from reference import E2M1, E4M3, as_bytes, assert_bits
from torch import Tensor

Q4_0 = gguf.GGMLQuantizationType.Q4_0
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def weights(e: int, r: int, c: int, seed: int = 0) -> Tensor:
    """Normal values under block magnitudes that vary by 2^20, with zeros, ties, outliers and whole zero blocks."""
    g = rng(seed)
    w = torch.randn(e, r, c, generator=g) * torch.exp2(torch.randint(-10, 10, (e, r, c // 16, 1), generator=g)).expand(
        e, r, c // 16, 16
    ).reshape(e, r, c)
    w[torch.rand(w.shape, generator=g) < 0.05] = 0
    w[0, 0] = 0
    w[0, 1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(c // 8)  # ties of e2m1 under scale 1
    w[0, 2] = -w[0, 1]
    w[-1, -1, 0] = 100
    return w


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantize_is_the_reference(name: str, dtype: torch.dtype, tier: str) -> None:
    """The decoded value, rounded once: exact products in float32 need no rounding at all, so the bits are fixed."""
    f = FORMATS[name]
    for e, r, c in ((2, 5, 96), (1, 130, 256), (3, 1, 32)):
        parts = f.make(rng(c), e, r, c)
        out = ops.dequantize(parts, f.name, dtype=dtype)
        want = f.decode(parts)
        assert out.shape == (e, r, c) and out.dtype == dtype and out.is_contiguous()
        if name in ("nvfp4", "fp8_block"):  # code * float32 scale is rounded to float32 first
            steps = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
            torch.testing.assert_close(
                out.double(), want, rtol=steps[dtype], atol=6e-8 if dtype == torch.float16 else 0
            )
        else:
            assert torch.equal(out, want.float().to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_anywhere(name: str, tier: str) -> None:
    """Odd addresses and a free expert stride, as in experts."""
    f = FORMATS[name]
    parts = f.make(rng(1), 3, 7, 64)
    want = ops.dequantize(parts, f.name, dtype=torch.float32)
    assert_bits(ops.dequantize([place(p, 1) for p in parts], f.name, dtype=torch.float32), want)
    assert_bits(ops.dequantize([spread(p, 5) for p in parts], f.name, dtype=torch.float32), want)


def test_q4_0_reads_what_gguf_wrote() -> None:
    """Blocks by gguf's own quantizer, decoded by the operator as gguf's own dequantizer does."""
    w = weights(3, 10, 128).numpy()
    theirs = gguf.quants.quantize(w, Q4_0)
    out = ops.dequantize([torch.from_numpy(theirs)], "q4_0", dtype=torch.float32)
    np.testing.assert_array_equal(out.numpy(), gguf.quants.dequantize(theirs, Q4_0))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_q4_0_writes_what_gguf_writes(scale: float, tier: str) -> None:
    for seed in range(5):
        w = weights(3, 20, 160, seed) * scale
        (ours,) = ops.quantize(w, "q4_0")
        np.testing.assert_array_equal(ours.numpy(), gguf.quants.quantize(w.numpy(), Q4_0))


def test_q4_0_opposite_extremes() -> None:
    """Where +amax and -amax both occur, the first one decides the sign of d."""
    w = torch.zeros(1, 4, 32)
    w[0, 0, 3], w[0, 0, 20] = 8.0, -8.0
    w[0, 1, 3], w[0, 1, 20] = -8.0, 8.0
    w[0, 2] = 1e-9  # d is below float16's subnormals: 0
    w[0, 3, 31] = 5e5  # d is above float16: -inf, as ggml stores it
    (ours,) = ops.quantize(w, "q4_0")
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(ours.numpy(), gguf.quants.quantize(w.numpy(), Q4_0))


def test_mxfp4_reads_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, scale = FORMATS["mxfp4"].make(rng(4), 3, 10, 128)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(packed.reshape(3, 10, 4, 16), scale, dtype=dtype)  # [E, C, R]
        assert_bits(ops.dequantize([packed, scale], "mxfp4", dtype=dtype), theirs.mT.contiguous())


@pytest.mark.parametrize(("name", "rule"), [("mxfp4", reference.encode_mxfp4), ("ds_fp4", reference.encode_ds_fp4)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_mx_rules(name: str, rule, dtype: torch.dtype, tier: str) -> None:
    """Every scale byte and every value by the published rule, ties to even, saturation included."""
    w = weights(2, 12, 256, 3).to(dtype)
    w[0, 3, :32] = torch.linspace(0, 7.99, 32).to(dtype)  # amax in (6, 8): saturates under mxfp4's rule
    w[0, 4, :32] = 6.0
    w[0, 5, :32] = torch.tensor(6.0).to(dtype).nextafter(torch.tensor(8.0).to(dtype)) if dtype == torch.float32 else 6.5
    packed, scale = ops.quantize(w, name)
    values, scales = rule(w.double().numpy())
    ours = as_bytes(scale).astype(np.int64)
    assert ((scales < 0) | (ours == scales)).all()
    got = reference.decode(name, [packed, scale]).numpy()
    np.testing.assert_array_equal(got, values)  # 0 == -0: the sign of a zero is not the rule's business


@pytest.mark.parametrize("name", ["mxfp4", "ds_fp4"])
def test_mx_extremes(name: str, tier: str) -> None:
    """The ends of float32: scales stay inside the byte's range and never become NaN's 255."""
    top, tiny = torch.finfo(torch.float32).max, 2.0**-149
    w = torch.tensor([top, 2.0**126, tiny, 2.0**-127, 3e-45, 2.0**-120])[None, :, None].expand(1, 6, 32).contiguous()
    packed, scale = ops.quantize(w, name)
    rule = reference.encode_mxfp4 if name == "mxfp4" else reference.encode_ds_fp4
    values, scales = rule(w.double().numpy())
    assert as_bytes(scale).max() < 255
    np.testing.assert_array_equal(as_bytes(scale), scales)
    np.testing.assert_array_equal(reference.decode(name, [packed, scale]).numpy(), values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nvfp4_rule(dtype: torch.dtype, tier: str) -> None:
    """global = the expert's amax / 2688 in every row; block scales and codes are nearest (up to float32)."""
    w = (weights(3, 10, 128, 5) * 2.0**-4).to(dtype)
    packed, scale, glob = ops.quantize(w, "nvfp4")
    assert packed.shape == (3, 10, 64) and scale.shape == (3, 10, 8) and glob.shape == (3, 10)
    want = w.float().abs().amax((1, 2)) / 2688
    torch.testing.assert_close(glob, want[:, None].expand(3, 10), rtol=2.0**-22, atol=0)
    x, g = w.double().numpy(), glob.double().numpy()
    s = E4M3[as_bytes(scale)]
    assert (s >= 0).all()
    ideal = np.abs(x.reshape(3, 10, 8, 16)).max(-1) / 6 / g[..., None]
    assert_nearest(s, np.minimum(ideal, 448), E4M3[:127], 1e-6)
    step = np.repeat(s, 16, -1) * g[..., None]
    got = reference.decode("nvfp4", [packed, scale, glob]).numpy()
    live = step > 0
    assert_nearest(
        (got / np.where(live, step, 1))[live], np.clip((x / np.where(live, step, 1))[live], -6, 6), E2M1, 1e-6
    )
    assert (got[~live] == 0).all()


def assert_nearest(got: np.ndarray, ideal: np.ndarray, table: np.ndarray, slack: float) -> None:
    """Each got is a table value at least as near to ideal as any other, within slack (relative) for ties."""
    table = np.unique(table)
    best = np.abs(ideal[..., None] - table).min(-1)
    assert np.isin(got, table).all() or np.abs(got[..., None] - table).min(-1).max() < 1e-6
    assert (np.abs(got - ideal) <= best + slack * (np.abs(ideal) + np.abs(got))).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("r", "c"), [(130, 257), (1, 1), (256, 128), (33, 500)])
def test_fp8_block_rule(r: int, c: int, dtype: torch.dtype, tier: str) -> None:
    w = (torch.randn(2, r, c, generator=rng(7)) * torch.logspace(-2, 2, r)[:, None]).to(dtype)
    codes, scale = ops.quantize(w, "fp8_block")
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (2, r, c)
    rows, columns = -(-r // 128), -(-c // 128)
    assert scale.dtype == torch.float32 and scale.shape == (2, rows, columns)
    x = w.double().numpy()
    for i in range(rows):
        for j in range(columns):
            block = np.s_[:, 128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            s = scale[:, i, j].double().numpy()
            np.testing.assert_allclose(s, np.abs(x[block]).max((1, 2)) / 448, rtol=2.0**-22)
            assert_nearest(E4M3[as_bytes(codes)][block], x[block] / s[:, None, None], E4M3[~np.isnan(E4M3)], 1e-6)


@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_is_a_cast(name: str, dtype: torch.dtype) -> None:
    w = weights(2, 5, 64).to(dtype)
    (out,) = ops.quantize(w, name)
    target = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]
    assert_bits(out, w.to(target))
    assert out.data_ptr() != w.data_ptr(), "a result must not alias its input"


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_a_fixed_point(name: str, tier: str) -> None:
    """What quantize gives decodes to values that it encodes without error again (ds_fp4 and mxfp4: bit for bit)."""
    f = FORMATS[name]
    w = weights(2, 8, 128, 9)
    once = ops.dequantize(ops.quantize(w, name), name, dtype=torch.float32)
    twice = ops.dequantize(ops.quantize(once, name), name, dtype=torch.float32)
    torch.testing.assert_close(twice, once, rtol=0 if f.block == 32 and name != "q4_0" else 2e-3, atol=0)
    steps = {"bf16": 2**-8, "f16": 2**-10, "f32": 0.0, "fp8_block": 2**-4}
    if name in steps:  # relative to the element, or to the block's least step
        least = w.abs().max() / 448 * 2**-9 if name == "fp8_block" else 1e-7
        assert ((once - w).abs() <= steps[name] * w.abs() + least).all()
    else:  # half of the widest step of e2m1 (4 to 6) or of q4_0, relative to the block's largest
        top = w.reshape(2, 8, -1, f.block).abs().amax(-1, keepdim=True).expand(2, 8, -1, f.block).reshape(w.shape)
        assert ((once - w).abs() <= top * 0.26 + w.abs().max() * 2e-5).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros(name: str, tier: str) -> None:
    parts = ops.quantize(torch.zeros(2, 4, 64), name)
    out = ops.dequantize(parts, name, dtype=torch.float32)
    assert (out == 0).all()
    mixed = torch.zeros(1, 4, 64)
    mixed[0, 2, 40] = 3.0
    out = ops.dequantize(ops.quantize(mixed, name), name, dtype=torch.float32)
    assert ((out != 0) == (mixed != 0)).all()


@pytest.mark.parametrize("name", NAMES)
def test_quantize_strides_and_shapes(name: str) -> None:
    """Any strides of the input; E = 0 and R = 0; the parts are as formats() says, contiguous, and usable at once."""
    w = weights(3, 8, 64, 2)
    want = ops.quantize(w, name)
    for layout in (
        w.transpose(0, 1).contiguous().transpose(0, 1),
        w.mT.contiguous().mT,
        torch.stack([w, w], -1)[..., 0],
    ):
        for part, expected in zip(ops.quantize(layout, name), want, strict=True):
            assert part.is_contiguous()
            assert_bits(part, expected)
    for shape in ((0, 8, 64), (2, 0, 64)):
        parts = ops.quantize(torch.zeros(shape), name)
        assert ops.dequantize(parts, name, dtype=torch.bfloat16).shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_thread_count_does_not_matter(name: str, threads) -> None:
    w = weights(2, 70, 160, 4)
    threads(1)
    one = ops.quantize(w, name)
    back = ops.dequantize(one, name, dtype=torch.bfloat16)
    threads(5)
    for a, b in zip(ops.quantize(w, name), one, strict=True):
        assert_bits(a, b)
    assert_bits(ops.dequantize(one, name, dtype=torch.bfloat16), back)


@pytest.mark.parametrize("name", NAMES)
def test_experts_on_quantized_weights(name: str) -> None:
    """The usual path of a user: quantize, then call."""
    from formats import Bank, make_inputs

    g = rng(11)
    w1, w2 = torch.randn(4, 128, 64, generator=g) / 8, torch.randn(4, 64, 64, generator=g) / 8
    bank = Bank(FORMATS[name], ops.quantize(w1, name), ops.quantize(w2, name))
    args = make_inputs(6, 64, 2, 4)
    out = bank.check(*args)
    dense = Bank(FORMATS["f32"], [w1], [w2]).reference(*args).value
    error = (out.double() - dense).norm() / dense.norm()
    assert error < {"bf16": 0.01, "f16": 0.01, "f32": 0.01, "fp8_block": 0.08}.get(name, 0.3)


def test_registry_matches_the_matrix() -> None:
    """A format that is registered but not tested, or the other way round, fails here."""
    import json

    listed = {f["name"]: f for f in json.loads(ops.formats())}
    assert list(listed) == NAMES or set(listed) == set(NAMES)
    for name, entry in listed.items():
        f = FORMATS[name]
        assert entry["block"] == f.block or f.block == 1
        assert len(entry["parts"]) == len(f.make(rng(0), 1, 2, 64))
        for part in entry["parts"]:
            assert {"name", "dtypes", "shape"} <= part.keys()
