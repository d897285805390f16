"""cpu_moe::experts against the float64 reference: shapes, routings, strides, dtypes, activations, on every tier.

Experts that no route selects are NaN and every part lies between guard pages wherever a shape is swept, so that a
kernel that reads one byte too many crashes or yields NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import torch
from formats import ANY_COLUMNS, FORMATS, NAMES, Bank, make_bank, make_inputs, place, rng, spread
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_bits, assert_close
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# ------------------------------------------------------------------------------------------------------------- shapes

BLOCK_SHAPES = [(32, 32), (96, 160), (320, 64), (64, 544)]
ODD_SHAPES = [(33, 1), (1, 33), (7, 129), (1000, 33), (130, 257)]
SHAPES = [(f, h, i) for f in FORMATS for h, i in BLOCK_SHAPES + (ODD_SHAPES if f in ANY_COLUMNS else [])]
SHAPES += [("nvfp4", 48, 16), ("nvfp4", 16, 80)]


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize(("name", "h", "i"), SHAPES)
def test_shapes_between_guards(name: str, h: int, i: int, side: str, tier: str, guard: Any) -> None:
    bank = make_bank(name, 5, h, i, seed=h + i, bias=True)
    bank.poison(keep=(0, 2, 4))
    bank = guard.bank(bank, side)
    hidden, ids, weights = make_inputs(5, h, 3, 3, dtype=torch.float32)
    bank.check(guard(hidden, side), guard(ids * 2, side), guard(weights, side))
    bank.check(hidden[:1], ids[:1] * 2, weights[:1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("h", "i"), [(2880, 704), (704, 2880)])
def test_model_shapes(name: str, h: int, i: int, each_tier: Iterator[str], guard: Any) -> None:
    bank = guard.bank(make_bank(name, 2, h, i), "end")
    args = make_inputs(3, h, 2, 2)
    want = bank.reference(*args)
    for tier in each_tier:
        assert_close(bank(*args), want, f"{name} on {tier}")
        assert_close(bank(*(a[:1] for a in args)), reference.Reference(want.value[:1], want.bound[:1]), tier)


@pytest.mark.parametrize("name", ANY_COLUMNS)
def test_thousand(name: str, each_tier: Iterator[str], guard: Any) -> None:
    """1000 is no multiple of 16, 32 or 128: dense and fp8 rows end inside a vector and inside a scale block."""
    bank = guard.bank(make_bank(name, 2, 1000, 1000), "end")
    args = make_inputs(3, 1000, 2, 2)
    want = bank.reference(*args)
    for tier in each_tier:
        assert_close(bank(*args), want, f"{name} on {tier}")


# ----------------------------------------------------------------------------------------------------------- anything


def strided(t: Tensor, how: str) -> Tensor:
    """The same values (for "expand": the first row everywhere) in another layout."""
    m, n = t.shape
    if how == "transposed":
        return t.T.contiguous().T
    if how == "padded":
        wide = torch.full((m, n + 3), -1, dtype=t.dtype)
        wide[:, 1 : n + 1] = t
        return wide[:, 1 : n + 1]
    if how == "stepped":
        wide = torch.full((m * 2, n * 3), -1, dtype=t.dtype)
        wide[::2, ::3] = t
        return wide[::2, ::3]
    if how == "expanded":
        return t[:1].expand(m, n)
    if how == "column":
        return t[:, :1].expand(m, n)
    return t.contiguous()


LAYOUTS = ["contiguous", "transposed", "padded", "stepped", "expanded", "column"]
ACTIVATIONS = [
    *({"activation": a} for a in ("silu", "gelu", "gelu_tanh", "relu2")),
    *({"activation": "swigluoai", "limit": x, "alpha": a} for x, a in ((None, 1.702), (7.0, 1.702), (0.5, 1.0))),
    *({"activation": "swiglu_clamp", "limit": x} for x in (None, 10.0, 0.25)),
]


@st.composite
def cases(draw: Callable[..., Any], name: str) -> tuple[Bank, tuple[Tensor, Tensor, Tensor]]:
    fmt = FORMATS[name]
    down = draw(st.sampled_from([None, None, *NAMES]))
    e, k, m = draw(st.integers(1, 6)), draw(st.integers(1, 10)), draw(st.integers(0, 40))
    h = fmt.columns(draw(st.integers(1, 200)))
    i = FORMATS[down or name].columns(draw(st.integers(1, 150)))
    seed = draw(st.integers(0, 2**16))
    kwargs: dict[str, Any] = dict(draw(st.sampled_from(ACTIVATIONS)))
    kwargs["interleaved"] = draw(st.booleans())
    kwargs["precision"] = draw(st.sampled_from(["exact", "exact", "fast"]))
    kwargs["apply_router_weight_on_input"] = k == 1 and draw(st.booleans())
    bank = make_bank(name, e, h, i, seed, down, bias=draw(st.booleans()), **kwargs)
    for b in ("gate_up_bias", "down_bias"):
        if b in bank.kwargs:
            bank.kwargs[b] = strided(bank.kwargs[b], draw(st.sampled_from(LAYOUTS))).to(draw(st.sampled_from(DTYPES)))
    hidden, ids, weights = make_inputs(m, h, k, e, seed + 1, draw(st.sampled_from(DTYPES)), draw(st.booleans()))
    route = draw(st.sampled_from(["any", "any", "some missing", "one expert", "none"]))
    if route == "some missing":
        missing = torch.rand(ids.shape, generator=rng(seed + 2)) < 0.4
        ids = torch.where(missing, -1 - draw(st.integers(0, 3)), ids)
        weights = torch.where(missing, torch.nan, weights)
    elif route == "one expert":
        ids = torch.full_like(ids, e - 1)
    elif route == "none":
        ids = torch.full_like(ids, -1)
    ids = ids.to(draw(st.sampled_from([torch.int32, torch.int64])))
    weights = weights.to(draw(st.sampled_from([*DTYPES, torch.float64])))
    hidden, ids, weights = (strided(t, draw(st.sampled_from(LAYOUTS))) for t in (hidden, ids, weights))
    if route == "some missing":  # layouts that repeat a value may have paired a NaN weight with a valid expert
        weights = torch.where(weights.isnan() & (ids >= 0), 0.5, weights)
    bank.poison(keep=[x for x in ids.unique().tolist() if x >= 0])
    return bank, (hidden, ids, weights)


@pytest.mark.parametrize("name", FORMATS)
def test_anything(name: str, tier: str) -> None:
    @given(cases(name))
    def run(case: tuple[Bank, tuple[Tensor, Tensor, Tensor]]) -> None:
        bank, args = case
        out = bank.check(*args)
        into = torch.full_like(out, torch.nan)
        torch.ops.cpu_moe.experts_out(*args, bank.gate_up, bank.down, **bank.formats, **bank.kwargs, out=into)
        assert_bits(into, out, "experts_out")

    run()


@pytest.mark.parametrize("down", NAMES)
def test_every_pair_of_formats(fmt: str, down: str, each_tier: Iterator[str], guard: Any) -> None:
    bank = make_bank(fmt, 3, 64, 96, down=down)
    bank.poison(keep=(0, 2))
    bank = guard.bank(bank, "end")
    hidden, ids, weights = make_inputs(3, 64, 2, 2, dtype=torch.float32)
    ids = ids * 2
    want = bank.reference(hidden, ids, weights)
    for tier in each_tier:
        assert_close(bank(hidden, ids, weights), want, f"{fmt} then {down} on {tier}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_dtype(name: str, dtype: torch.dtype, tier: str) -> None:
    bank = make_bank(name, 4, 64, 64, bias=True)
    bank.check(*make_inputs(4, 64, 2, 4, dtype=dtype))


# ----------------------------------------------------------------------------------------------- bits that never move


@pytest.mark.parametrize("name", FORMATS)
def test_batch_invariance(name: str, tier: str) -> None:
    """A token's bits do not depend on M, on its place in the batch, or on who else uses its experts."""
    bank = make_bank(name, 6, 96, 64, bias=True)
    args = make_inputs(40, 96, 3, 6)
    full = bank.check(*args)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39):
        assert_bits(bank(*(a[:m] for a in args)), full[:m], f"M={m}")
    for t in (11, 39):
        assert_bits(bank(*(a[t : t + 1] for a in args)), full[t : t + 1], f"token {t} alone")
    order = torch.randperm(40, generator=rng(9))
    assert_bits(bank(*(a[order] for a in args)), full[order], "permuted tokens")
    crowd = args[1].clone()
    crowd[1:] = args[1][0]  # everybody on the first token's experts
    assert_bits(bank(args[0], crowd, args[2])[:1], full[:1], "crowded experts")


@pytest.mark.parametrize("name", FORMATS)
def test_thread_count(name: str, tier: str, threads: Callable[[int], None]) -> None:
    """THR-04: more threads than row tiles, prime counts, far more than cores: the same bits."""
    for h, i, m in ((32, 32, 1), (64, 160, 1), (128, 32, 7)):
        bank = make_bank(name, 4, h, i, bias=True)
        args = make_inputs(m, h, 3, 4)
        threads(1)
        one = bank.check(*args)
        for n in (2, 3, 4, 7, 16):
            threads(n)
            assert_bits(bank(*args), one, f"{n} threads, {h}x{i}, M={m}")
            assert_bits(bank(*args), one, f"{n} threads again")


def test_256_threads(threads: Callable[[int], None]) -> None:
    banks = [make_bank(name, 4, 64, 64) for name in FORMATS]
    args = make_inputs(5, 64, 3, 4)
    threads(1)
    ones = [bank(*args) for bank in banks]
    for n in (61, 256):
        threads(n)
        assert torch.ops.cpu_moe.get_num_threads() == n
        for bank, one in zip(banks, ones, strict=True):
            assert_bits(bank(*args), one, f"{bank.fmt}, {n} threads")


@pytest.mark.parametrize("name", FORMATS)
def test_repeats(name: str) -> None:
    bank = make_bank(name, 8, 128, 96)
    args = make_inputs(17, 128, 4, 8)
    first = bank(*args)
    for _ in range(20):
        assert_bits(bank(*args), first)


@pytest.mark.parametrize("name", FORMATS)
def test_tiers_agree(name: str, each_tier: Iterator[str]) -> None:
    """Two tiers differ by no more than both bounds together (they may share the bits, but need not)."""
    bank = make_bank(name, 4, 256, 128)
    args = make_inputs(9, 256, 2, 4, dtype=torch.float32)
    bound = bank.reference(*args).bound
    outs = {tier: bank(*args).double() for tier in each_tier}
    first = next(iter(outs.values()))
    for tier, out in outs.items():
        assert ((out - first).abs() <= 2 * bound + 2.0**-21 * first.abs()).all(), tier


# ---------------------------------------------------------------------------------------------------- where banks lie


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gap", [1, 64])
def test_expert_stride(name: str, gap: int, tier: str) -> None:
    """The expert stride is free; the bytes between experts are NaN."""
    bank = make_bank(name, 4, 96, 64, bias=True)
    args = make_inputs(5, 96, 2, 4)
    want = bank(*args)
    loose = bank.with_()
    loose.gate_up = [spread(p, gap) for p in bank.gate_up]
    loose.down = [spread(p, gap) for p in bank.down]
    assert loose.gate_up[0].stride(0) == bank.gate_up[0].stride(0) + gap
    assert_bits(loose(*args), want)
    same = bank.with_()  # expert stride 0: one expert's weights under four ids
    same.gate_up = [p[1:2].expand(4, *p.shape[1:]) for p in bank.gate_up]
    same.down = [p[1:2].expand(4, *p.shape[1:]) for p in bank.down]
    same.kwargs = {}
    ones = torch.ones_like(args[1])
    assert_bits(same(*args), bank(args[0], ones, args[2], gate_up_bias=None, down_bias=None))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("offset", [1, 2, 3, 7, 33])
def test_byte_offsets(name: str, offset: int, tier: str) -> None:
    """Tensors borrowed from a mapped file start anywhere."""
    bank = make_bank(name, 3, 64, 96)
    args = make_inputs(3, 64, 2, 3)
    want = bank.check(*args)
    moved = bank.with_()
    moved.gate_up = [place(p, offset) for p in bank.gate_up]
    moved.down = [place(p, offset) for p in bank.down]
    assert_bits(moved(*args), want)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_scale_strides(scale_dtype: torch.dtype, tier: str) -> None:
    """NUM-12: scales in padded rows, transposed, expanded; each block's scale is another one, so a shift shows."""
    e, h, i = 3, 320, 1000
    bank = make_bank("fp8_block", e, h, i)

    def distinct(rows: int, columns: int) -> Tensor:
        blocks = e * -(-rows // 128) * -(-columns // 128)
        return (1 + torch.arange(blocks).float() / 64).reshape(e, -(-rows // 128), -(-columns // 128)).to(scale_dtype)

    bank.gate_up[1], bank.down[1] = distinct(2 * i, h) * 2**-9, distinct(h, i) * 2**-9
    args = make_inputs(3, h, 2, e)
    want = bank.check(*args)

    def padded(s: Tensor) -> Tensor:
        wide = torch.full((s.shape[0], s.shape[1] + 1, s.shape[2] + 5), torch.nan, dtype=s.dtype)
        wide[:, :-1, 2:-3] = s
        return wide[:, :-1, 2:-3]

    layouts: list[Callable[[Tensor], Tensor]] = [
        padded,
        lambda s: s.mT.contiguous().mT,
        lambda s: s.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        lambda s: place(s, 1),
    ]
    for layout in layouts:
        moved = bank.with_()
        moved.gate_up = [bank.gate_up[0], layout(bank.gate_up[1])]
        moved.down = [bank.down[0], layout(bank.down[1])]
        assert_bits(moved(*args), want)
    one = bank.with_()
    one.__dict__.pop("w1"), one.__dict__.pop("w2")
    one.gate_up = [bank.gate_up[0], bank.gate_up[1][:, :1, :1].expand_as(bank.gate_up[1])]
    one.down = [bank.down[0], bank.down[1][:1].expand_as(bank.down[1])]
    one.check(*args)


def test_nvfp4_globals_of_each_half(tier: str) -> None:
    """NUM-06: gate, up and down each have their own global scale, another one per expert."""
    bank = make_bank("nvfp4", 4, 64, 48, bias=True)
    per_expert = torch.tensor([1.0, 3.0, 0.3, 7.0])[:, None]
    bank.gate_up[2] = torch.cat([per_expert * 0.01 * torch.ones(4, 48), per_expert * 0.001 * torch.ones(4, 48)], 1)
    bank.down[2] = 0.03 / per_expert * torch.ones(4, 64)
    bank.check(*make_inputs(6, 64, 2, 4, dtype=torch.float32))
    expanded = bank.with_()
    expanded.down = [*bank.down[:2], (0.03 / per_expert).expand(4, 64).contiguous()]
    args = make_inputs(6, 64, 2, 4)
    assert_bits(expanded(*args), bank(*args))


# --------------------------------------------------------------------------------------------------- precision="fast"


def test_fast_q4_0_is_q8_0(tier: str) -> None:
    """fast q4_0 rounds activations as ggml's Q8_0: the emulation within float32's rounding, not the exact result."""
    bank = make_bank("q4_0", 4, 256, 128, bias=True)
    for scale in (1e-3, 1.0, 300.0):
        hidden, ids, weights = make_inputs(7, 256, 3, 4, dtype=torch.float32)
        fast = bank.check(hidden * scale, ids, weights, precision="fast")
        exact = bank.check(hidden * scale, ids, weights)
        assert not torch.equal(fast, exact)


def test_fast_dot_alone(tier: str) -> None:
    """One projection only, so that no second rounding blurs the comparison: fp32 rounding and nothing else."""
    h, i = 96, 160
    bank = make_bank("q4_0", 1, h, i)
    bank.down_fmt = FORMATS["f32"]
    bank.down = [torch.randn(1, h, i, generator=rng(5))]
    bank.kwargs = {"activation": "relu2"}
    hidden = torch.randn(33, h, generator=rng(6))
    hidden[0] = 0
    hidden[1, :32] = 0
    args = hidden, torch.zeros(33, 1).long(), torch.ones(33, 1)
    bank.check(*args, precision="fast")


# --------------------------------------------------------------------------------------------------------- parameters


def test_weights_may_be_parameters() -> None:
    bank = make_bank("bf16", 2, 32, 32)
    args = make_inputs(2, 32, 1, 2)
    want = bank(*args)
    held = bank.with_()
    held.gate_up = [torch.nn.Parameter(p) for p in bank.gate_up]
    held.down = [torch.nn.Parameter(p) for p in bank.down]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_bits(held(*args), want)


@pytest.mark.parametrize("name", FORMATS)
def test_interleaved_is_a_layout_only(name: str, tier: str) -> None:
    """NUM-07: the same expert as [gate; up] and as interleaved rows: the same bits under every activation."""
    f = FORMATS[name]
    h, i = 64, 64
    halves = make_bank(name, 3, h, i, bias=True)
    mix = torch.arange(2 * i).reshape(2, i).T.reshape(-1)  # gate0, up0, gate1, up1, ...
    if name.startswith("fp8"):  # 2I = 128 rows: one scale block, so that moving rows keeps their scales
        assert halves.gate_up[1].shape[1] == 1
        parts = [halves.gate_up[0].view(torch.uint8)[:, mix].view(torch.float8_e4m3fn), halves.gate_up[1]]
    else:
        parts = [
            (p.view(torch.uint8)[:, mix].view(p.dtype) if p.element_size() == 1 else p[:, mix]) for p in halves.gate_up
        ]
    mixed = Bank(f, parts, halves.down, None, {**halves.kwargs, "gate_up_bias": halves.kwargs["gate_up_bias"][:, mix]})
    args = make_inputs(5, h, 2, 3)
    for extra in ACTIVATIONS:
        assert_bits(mixed(*args, interleaved=True, **extra), halves.check(*args, **extra), str(extra))
