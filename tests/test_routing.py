"""Routes: what negative, repeated, foreign and missing experts do (cases IDS-01, 02, 04, 07, 09, 10)."""

from __future__ import annotations

import pytest
import torch
from formats import FORMATS, Bank, make_bank, make_inputs, ops
from reference import assert_bits

NAN = float("nan")


def poison_allocator(bank: Bank, h: int, m: int, k: int) -> None:
    """Leaves NaN in freed blocks of the sizes that the next call will ask for, and in the operator's own scratch."""
    for shape in ((m, h), (m * k, h), (m * k, 4 * h)):
        for dtype in (torch.bfloat16, torch.float32):
            junk = [torch.full(shape, NAN, dtype=dtype) for _ in range(4)]
            del junk
    bank(torch.full((m, h), NAN), torch.zeros(m, k).long(), torch.full((m, k), NAN))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_negative_ids(name: str, ids_dtype: torch.dtype, tier: str) -> None:
    """IDS-01: a slot with id < 0 adds nothing, not even its (NaN) weight or its (NaN) expert."""
    bank = make_bank(name, 8, 64, 96)
    hidden = make_inputs(4, 64, 4, 8)[0]
    ids = torch.tensor([[1, 3, 5, 6], [1, -1, 5, 6], [-1, -1, -7, 6], [-1, -1, -1, -(2**31)]], dtype=ids_dtype)
    weights = torch.rand(4, 4) + 0.1
    weights[ids < 0] = NAN
    bank.poison(keep=(1, 3, 5, 6))
    poison_allocator(bank, 64, 4, 4)
    out = bank.check(hidden, ids, weights)
    assert (out[3] == 0).all() and not torch.signbit(out[3]).any()
    assert_bits(bank(hidden[1:2], ids[1:2, [0, 2, 3]], weights[1:2, [0, 2, 3]]), out[1:2], "without the -1 slot")
    assert_bits(bank(hidden[2:3], ids[2:3, 3:], weights[2:3, 3:]), out[2:3], "one slot left")
    assert_bits(bank(hidden[:1], ids[:1], weights[:1]), out[:1])


def test_int64_minimum() -> None:
    bank = make_bank("bf16", 2, 32, 32)
    ids = torch.tensor([[-(2**63), 0], [-(2**32), 1]])
    out = bank.check(make_inputs(2, 32, 1, 1)[0], ids, torch.ones(2, 2))
    assert_bits(out, bank(make_inputs(2, 32, 1, 1)[0], ids[:, 1:], torch.ones(2, 1)))


@pytest.mark.parametrize("bad", [4, 5, 2**31 - 1, 2**32 + 3, 2**32, 2**62])
def test_out_of_range(bad: int, tier: str) -> None:
    """IDS-02: an exception that names value and position before anything is computed; the pool stays usable."""
    bank = make_bank("mxfp4", 4, 64, 64)
    hidden, ids, weights = make_inputs(5, 64, 2, 4)
    good = bank(hidden, ids, weights)
    wrong = ids.clone()
    wrong[3, 1] = bad
    with pytest.raises(IndexError) as error:
        bank(hidden, wrong, weights)
    text = str(error.value)
    assert "topk_ids" in text and str(bad) in text and "3" in text and "1" in text and "4" in text
    out = torch.full_like(good, 7)
    with pytest.raises(IndexError):
        ops.experts_out(hidden, wrong, weights, bank.gate_up, bank.down, "mxfp4", out=out)
    assert (out == 7).all(), "written before the check"
    assert_bits(bank(hidden, ids, weights), good)


def test_out_of_range_int32_and_compiled() -> None:
    bank = make_bank("bf16", 4, 32, 32)
    hidden, ids, weights = make_inputs(2, 32, 2, 4)
    wrong = ids.clone()
    wrong[1, 0] = 4
    with pytest.raises(IndexError, match="topk_ids"):
        bank(hidden, wrong.int(), weights)
    compiled = torch.compile(lambda h, i, w: bank(h, i, w) * 2, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match="topk_ids"):
        compiled(hidden, wrong, weights)
    assert_bits(compiled(hidden, ids, weights), bank(hidden, ids, weights) * 2)


def test_the_first_bad_id_is_named() -> None:
    bank = make_bank("bf16", 4, 32, 32)
    hidden, ids, weights = make_inputs(6, 32, 3, 4)
    ids[2, 1], ids[4, 0] = 77, 99
    with pytest.raises(IndexError, match="77"):
        bank(hidden, ids, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weight_dtypes(dtype: torch.dtype, tier: str) -> None:
    """IDS-04: router weights of each dtype, contiguous or a column slice, for each hidden dtype."""
    bank = make_bank("mxfp4", 4, 64, 64)
    for hidden_dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden, ids, weights = make_inputs(5, 64, 3, 4, dtype=hidden_dtype)
        weights = weights.to(dtype)
        bank.check(hidden, ids, weights)
        wide = torch.full((5, 9), NAN, dtype=dtype)
        wide[:, 2:8:2] = weights
        assert_bits(bank(hidden, ids, wide[:, 2:8:2]), bank(hidden, ids, weights))


def test_zero_and_negative_weights(tier: str) -> None:
    bank = make_bank("q4_0", 4, 64, 64)
    hidden, ids, weights = make_inputs(4, 64, 3, 4)
    weights[0] = 0
    weights[1] = -weights[1]
    weights[2, 0] = 0
    out = bank.check(hidden, ids, weights)
    assert (out[0] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_empty(name: str, tier: str) -> None:
    """IDS-07: no tokens, tokens without routes, and normal calls between them."""
    bank = make_bank(name, 4, 64, 64)
    args = make_inputs(3, 64, 2, 4)
    want = bank(*args)
    empty = tuple(a[:0] for a in args)
    none = (args[0], torch.full_like(args[1], -1), torch.full_like(args[2], NAN))
    for _ in range(25):
        out = bank(*empty)
        assert out.shape == (0, 64) and out.dtype == torch.bfloat16
        assert (bank(*none) == 0).all()
        assert_bits(bank(*args), want)


def test_empty_thousand_times() -> None:
    bank = make_bank("mxfp4", 4, 32, 32)
    args = make_inputs(1, 32, 2, 4)
    want = bank(*args)
    for n in range(1000):
        bank(*(a[:0] for a in args))
        bank(args[0], -torch.ones_like(args[1]), args[2])
        if n % 100 == 0:
            assert_bits(bank(*args), want)


def test_no_experts_at_all() -> None:
    """A rank that holds none of the layer's experts: E = 0, every id negative."""
    bank = make_bank("bf16", 0, 32, 32)
    out = ops.experts(torch.randn(2, 32), torch.full((2, 3), -1), torch.ones(2, 3), bank.gate_up, bank.down, "bf16")
    assert torch.equal(out, torch.zeros(2, 32))
    with pytest.raises(IndexError, match="topk_ids"):
        ops.experts(torch.randn(2, 32), torch.zeros(2, 3).long(), torch.ones(2, 3), bank.gate_up, bank.down, "bf16")


@pytest.mark.parametrize("name", FORMATS)
def test_duplicates_add_up(name: str, tier: str) -> None:
    bank = make_bank(name, 4, 64, 64)
    hidden = make_inputs(3, 64, 1, 4, dtype=torch.float32)[0]
    ids = torch.tensor([[2, 2, 2, 2], [1, 3, 1, 3], [0, -1, 0, 0]])
    weights = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 2.0, 3.0, 4.0], [1.0, NAN, -1.0, 0.5]])
    out = bank.check(hidden, ids, weights)
    once = bank(hidden[:1], torch.tensor([[2]]), torch.tensor([[1.0]]))
    torch.testing.assert_close(out[:1], once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_weight_on_input(name: str, precision: str, tier: str) -> None:
    """IDS-09: applied once, before any rounding of activations, and not at the output as well."""
    bank = make_bank(name, 3, 64, 64, precision=precision)
    hidden, ids, _ = make_inputs(6, 64, 1, 3, dtype=torch.float32)
    weights = torch.tensor([0.25, 1.0, 3.0, 0.1, -2.0, 0.7])[:, None]
    out = bank.check(hidden, ids, weights, apply_router_weight_on_input=True)
    scaled = bank(hidden * weights, ids, torch.ones_like(weights))
    assert_bits(out, scaled)
    at_output = bank(hidden, ids, weights)
    assert not torch.allclose(out[0], at_output[0], rtol=1e-2)
    missing = bank(hidden[:1], torch.tensor([[-1]]), torch.tensor([[NAN]]), apply_router_weight_on_input=True)
    assert (missing == 0).all()
    with pytest.raises(ValueError, match="apply_router_weight_on_input"):
        bank(hidden, ids.expand(6, 2), weights.expand(6, 2), apply_router_weight_on_input=True)


@pytest.mark.parametrize("name", FORMATS)
def test_shared_expert_as_a_column(name: str, tier: str) -> None:
    """IDS-10: an extra column with the last id is an expert like any other, with the same clamps."""
    bank = make_bank(name, 5, 64, 64, activation="swiglu_clamp", limit=0.5)
    hidden, ids, weights = make_inputs(4, 64, 2, 4, dtype=torch.float32)
    shared = torch.full((4, 1), 4)
    one = torch.ones(4, 1)
    both = bank.check(hidden, torch.cat([ids, shared], 1), torch.cat([weights, one], 1))
    apart = bank(hidden, ids, weights) + bank(hidden, shared, one)
    torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-5)


def test_many_slots(tier: str) -> None:
    """k far beyond E and beyond any vector: 300 routes of one token."""
    bank = make_bank("nvfp4", 3, 32, 32)
    bank.check(*make_inputs(3, 32, 300, 3, dtype=torch.float32))


def test_groups_of_every_size(tier: str) -> None:
    """Experts with 0, 1, 2, ... 20 tokens in one call, so that every remainder of the token tile occurs."""
    counts = list(range(21))
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])[:, None]
    order = torch.randperm(ids.shape[0], generator=torch.Generator().manual_seed(3))
    ids = ids[order]
    for name in FORMATS:
        bank = make_bank(name, len(counts), 64, 32)
        hidden = make_inputs(ids.shape[0], 64, 1, 1)[0]
        bank.check(hidden, ids, torch.ones(ids.shape[0], 1), what=f"{name} on {tier}")


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_are_not_written(name: str) -> None:
    """Inputs keep their bits: the operator is functional."""
    bank = make_bank(name, 3, 64, 64, bias=True)
    args = make_inputs(5, 64, 2, 3)
    every = [*args, *bank.gate_up, *bank.down, bank.kwargs["gate_up_bias"], bank.kwargs["down_bias"]]
    before = [t.clone() for t in every]
    bank(*args)
    ops.dequantize(bank.down, bank.fmt.name, dtype=torch.float32)
    for t, b in zip(every, before, strict=True):
        assert_bits(t, b)
