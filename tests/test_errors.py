"""Every error: its Python type, and a message that names the argument, what came and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FORMATS, NAMES, make_bank, make_inputs, ops, spread

E, H, N, M, K = 4, 64, 96, 5, 2  # N is the intermediate size I
Call = dict[str, Any]


def call(fmt: str = "mxfp4", **changes: Any) -> Call:
    """The arguments of a correct call, with changes."""
    bank = make_bank(fmt, E, H, N)
    hidden, ids, weights = make_inputs(M, H, K, E)
    good: Call = {
        "hidden": hidden,
        "topk_ids": ids,
        "topk_weights": weights,
        "gate_up": bank.gate_up,
        "down": bank.down,
        "format": fmt,
    }
    return {**good, **changes}


def fails(kind: type[Exception], arguments: Call, *words: str) -> None:
    """The call raises `kind` with every word in its message, and experts_out says the same and writes nothing."""
    with pytest.raises(kind) as error:
        ops.experts(**arguments)
    text = str(error.value)
    for word in words:
        assert re.search(word, text), f"{word!r} not in {text!r}"
    assert "\n" not in text.strip() and ".cpp" not in text, text
    hidden = arguments["hidden"]
    if hidden.dim() == 2 and hidden.device.type == "cpu":
        out = torch.full(tuple(hidden.shape), 7.0).to(hidden.dtype)
        with pytest.raises(kind):
            ops.experts_out(**arguments, out=out)
        assert (out == 7).all() or not hidden.is_floating_point()


def test_the_correct_call_is_correct() -> None:
    for fmt in NAMES:
        ops.experts(**call(fmt))


# -------------------------------------------------------------------------------------------------- hidden and routes


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "float64"),
        (torch.int32, "int32"),
        (torch.uint8, "uint8"),
        (torch.complex64, "complex64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_hidden_dtype(dtype: torch.dtype, name: str) -> None:
    fails(TypeError, call(hidden=torch.zeros(M, H).to(dtype)), "hidden", f"got {name}", "bfloat16")


@pytest.mark.parametrize("shape", [(H,), (M, H, 1), (1, M, H)])
def test_hidden_rank(shape: tuple[int, ...]) -> None:
    fails(ValueError, call(hidden=torch.zeros(shape)), "hidden", re.escape(str(list(shape))), "M, H")


def test_hidden_width() -> None:
    fails(ValueError, call(hidden=torch.zeros(M, H + 32)), "hidden|gate_up", "96|48", "64|32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_ids_dtype(dtype: torch.dtype) -> None:
    fails(TypeError, call(topk_ids=torch.zeros(M, K).to(dtype)), "topk_ids", "(?i)int32|int", "(?i)int64|long")


@pytest.mark.parametrize("shape", [(M,), (M, K, 1)])
def test_ids_rank(shape: tuple[int, ...]) -> None:
    fails(ValueError, call(topk_ids=torch.zeros(shape).long()), "topk_ids", re.escape(str(list(shape))), "M, k")


def test_ids_rows() -> None:
    fails(ValueError, call(topk_ids=torch.zeros(M + 1, K).long()), "topk_ids", "6", "5")


def test_no_slots() -> None:
    arguments = call(topk_ids=torch.zeros(M, 0).long(), topk_weights=torch.zeros(M, 0))
    fails(ValueError, arguments, "topk_ids", "k", "1|0")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.bool])
def test_weights_dtype(dtype: torch.dtype) -> None:
    fails(TypeError, call(topk_weights=torch.ones(M, K).to(dtype)), "topk_weights")


@pytest.mark.parametrize("shape", [(M,), (M, K + 1), (M + 1, K), (K, M)])
def test_weights_shape(shape: tuple[int, ...]) -> None:
    fails(ValueError, call(topk_weights=torch.ones(shape)), "topk_weights", re.escape(str(list(shape))), r"5, 2")


@pytest.mark.parametrize("bad", [4, 2**32 + 3, 2**62])
def test_ids_out_of_range(bad: int) -> None:
    ids = torch.zeros(M, K).long()
    ids[3, 1] = bad
    fails(IndexError, call(topk_ids=ids), r"topk_ids\[3, ?1\]|topk_ids.*3.*1", str(bad), "4")


# ------------------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("name", ["MXFP4", "fp4", "", "int4", "q4_0 "])
def test_unknown_format(name: str) -> None:
    fails(ValueError, call(format=name), "format", re.escape(name), *NAMES)
    fails(ValueError, call(down_format=name), "down_format", re.escape(name), *NAMES)
    for convert in (
        lambda: ops.quantize(torch.zeros(1, 32, 32), name),
        lambda: ops.dequantize([torch.zeros(1, 32, 32)], name, dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match="format") as error:
            convert()
        assert all(known in str(error.value) for known in NAMES)


@pytest.mark.parametrize("which", ["gate_up", "down"])
@pytest.mark.parametrize("fmt", NAMES)
def test_part_count(fmt: str, which: str) -> None:
    good = call(fmt)
    n = len(good[which])
    for parts in (good[which] + good[which][:1], good[which][:-1], []):
        fails(ValueError, {**good, which: parts}, which, fmt, str(n), str(len(parts)))


@pytest.mark.parametrize("which", ["gate_up", "down"])
@pytest.mark.parametrize("fmt", NAMES)
def test_part_dtype(fmt: str, which: str) -> None:
    for index in range(len(call(fmt)[which])):
        good = call(fmt)
        parts = list(good[which])
        parts[index] = torch.zeros(parts[index].shape, dtype=torch.int32)
        fails(TypeError, {**good, which: parts}, re.escape(f"{which}[{index}]"), "(?i)int")


@pytest.mark.parametrize("which", ["gate_up", "down"])
@pytest.mark.parametrize("fmt", NAMES)
def test_part_shape(fmt: str, which: str) -> None:
    """Each dimension of each part one too large; and a rank too low."""
    for index in range(len(call(fmt)[which])):
        good = call(fmt)
        part = good[which][index]
        for dim in range(part.dim()):
            shape = [*part.shape]
            shape[dim] += 1
            parts = list(good[which])
            parts[index] = torch.zeros(shape, dtype=torch.uint8).to(part.dtype)
            # gate_up's first part defines E and I: where it is the odd one out, `down` is what does not fit.
            named = f"{which}[{index}]" if index else which
            fails(ValueError, {**good, which: parts}, "gate_up|down" if named == "gate_up" else re.escape(named))
            if index:
                fails(ValueError, {**good, which: parts}, re.escape(str(shape)), re.escape(str(list(part.shape))))
        parts = list(good[which])
        parts[index] = part[0]
        fails(ValueError, {**good, which: parts}, re.escape(f"{which}[{index}]"), re.escape(str(list(part[0].shape))))


def test_projections_that_do_not_fit() -> None:
    good = call("bf16")
    fails(ValueError, {**good, "down": [torch.zeros(E, H, N + 1).bfloat16()]}, "down", "97", "96")
    fails(ValueError, {**good, "down": [torch.zeros(E, H + 1, N).bfloat16()]}, "down", "65", "64")
    fails(ValueError, {**good, "down": [torch.zeros(E + 1, H, N).bfloat16()]}, "down", "5", "4")
    fails(ValueError, {**good, "gate_up": [torch.zeros(E, 2 * N + 1, H).bfloat16()]}, "gate_up", "193")


@pytest.mark.parametrize(("fmt", "block"), [(n, f.block) for n, f in FORMATS.items() if f.block > 1])
def test_columns_that_fill_no_block(fmt: str, block: int) -> None:
    """The 4-bit formats need C in whole blocks: the message names C or the block."""
    h = 2 * block + block // 2
    if fmt == "q4_0":
        gate_up_parts = [torch.zeros(E, 2 * N, 45, dtype=torch.uint8)]  # 2.5 blocks of 18 bytes
    else:
        gate_up_parts = [p.clone() for p in call(fmt)["gate_up"]]
        gate_up_parts[0] = torch.zeros(E, 2 * N, h // 2, dtype=torch.uint8)
    arguments = call(fmt, hidden=torch.zeros(M, h), gate_up=gate_up_parts, down_format="bf16")
    arguments["down"] = [torch.zeros(E, h, N).bfloat16()]
    fails(ValueError, arguments, re.escape("gate_up"), str(block) if fmt != "q4_0" else "18|32")
    with pytest.raises(ValueError, match=str(block)):
        ops.quantize(torch.zeros(1, 4, h), fmt)


@pytest.mark.parametrize("fmt", NAMES)
def test_part_strides(fmt: str) -> None:
    """Inside an expert parts are contiguous; the message says which part and how to fix it."""
    for index, part in enumerate(call(fmt)["down"]):
        if fmt == "fp8_block" and index == 1:
            continue  # its scales take any strides
        good = call(fmt)
        wide = torch.zeros(*part.shape[:-1], 2 * part.shape[-1], dtype=torch.uint8).to(part.dtype)
        parts = list(good["down"])
        parts[index] = wide[..., ::2]
        fails(ValueError, {**good, "down": parts}, re.escape(f"down[{index}]"), "contiguous")
        ops.experts(**{**good, "down": [spread(p, 3) for p in good["down"]]})


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("name", ["SILU", "swiglu", "", "relu"])
def test_unknown_activation(name: str) -> None:
    known = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglu_clamp")
    fails(ValueError, call(activation=name), "activation", re.escape(name), *known)


@pytest.mark.parametrize("name", ["Exact", "int8", ""])
def test_unknown_precision(name: str) -> None:
    fails(ValueError, call(precision=name), "precision", re.escape(name), "exact", "fast")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("activation", ["swigluoai", "swiglu_clamp"])
def test_bad_limit(limit: float, activation: str) -> None:
    fails(ValueError, call(activation=activation, limit=limit), "limit", "> 0|above 0")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_limit_of_an_activation_without_one(activation: str) -> None:
    fails(ValueError, call(activation=activation, limit=7.0), "limit", activation)


@pytest.mark.parametrize("alpha", [float("nan")])
def test_nan_alpha(alpha: float) -> None:
    fails(ValueError, call(activation="swigluoai", alpha=alpha), "alpha", "(?i)nan")


def test_weight_on_input_of_two_slots() -> None:
    fails(ValueError, call(apply_router_weight_on_input=True), "apply_router_weight_on_input", "k", "2")


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        ("gate_up_bias", (E, N)),
        ("gate_up_bias", (2 * N,)),
        ("gate_up_bias", (E + 1, 2 * N)),
        ("down_bias", (E, N)),
        ("down_bias", (H,)),
    ],
)
def test_bias_shape(which: str, shape: tuple[int, ...]) -> None:
    expected = [E, 2 * N] if which == "gate_up_bias" else [E, H]
    fails(ValueError, call(**{which: torch.zeros(shape)}), which, re.escape(str(list(shape))), re.escape(str(expected)))


@pytest.mark.parametrize("which", ["gate_up_bias", "down_bias"])
def test_bias_dtype(which: str) -> None:
    width = 2 * N if which == "gate_up_bias" else H
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.float64):
        fails(TypeError, call(**{which: torch.zeros(E, width).to(dtype)}), which)


# ------------------------------------------------------------------------------------------------- grad, devices, out


@pytest.mark.parametrize("which", ["hidden", "topk_weights", "gate_up", "down", "gate_up_bias", "down_bias"])
def test_requires_grad(which: str) -> None:
    good = call("bf16", gate_up_bias=torch.zeros(E, 2 * N), down_bias=torch.zeros(E, H))
    old = good[which]
    new = [old[0].clone().requires_grad_()] if isinstance(old, list) else old.clone().requires_grad_()
    fails(RuntimeError, {**good, which: new}, which, "requires_grad|requires grad", "no_grad")
    with torch.no_grad():
        ops.experts(**{**good, which: new})
    with torch.inference_mode():
        ops.experts(**{**good, which: new})


@pytest.mark.parametrize(
    "which", ["hidden", "topk_ids", "topk_weights", "gate_up", "down", "gate_up_bias", "down_bias"]
)
def test_one_meta_argument(which: str) -> None:
    """A meta tensor among real ones has no data to compute with: an error, not an unwritten result."""
    good = call("bf16", gate_up_bias=torch.zeros(E, 2 * N), down_bias=torch.zeros(E, H))
    old = good[which]
    new = [t.to("meta") for t in old] if isinstance(old, list) else old.to("meta")
    with pytest.raises(RuntimeError) as error:
        ops.experts(**{**good, which: new})
    assert which in str(error.value) and "meta" in str(error.value)


def test_all_meta_is_fake() -> None:
    good = call("bf16")
    meta: Call = {
        n: a.to("meta") if isinstance(a, torch.Tensor) else [t.to("meta") for t in a] if isinstance(a, list) else a
        for n, a in good.items()
    }
    out = ops.experts(**meta)
    assert out.device.type == "meta" and out.shape == (M, H) and out.dtype == torch.bfloat16


def test_sparse_and_quantized_layouts() -> None:
    good = call("bf16")
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        ops.experts(**{**good, "hidden": good["hidden"].to_sparse()})


def test_out() -> None:
    good = call("bf16")
    for out, kind, words in (
        (torch.zeros(M, H), TypeError, ("out", "(?i)float|f32", "(?i)bf")),
        (torch.zeros(M + 1, H).bfloat16(), ValueError, ("out", "6", "5")),
        (torch.zeros(M * H).bfloat16(), ValueError, ("out",)),
    ):
        with pytest.raises(kind) as error:
            ops.experts_out(**good, out=out)
        for word in words:
            assert re.search(word, str(error.value)), str(error.value)


def test_out_that_overlaps_itself_or_hidden() -> None:
    """An expanded `out` has fewer places than elements; one that aliases hidden is read while it is written."""
    good = call("bf16")
    with pytest.raises((ValueError, RuntimeError), match="out"):
        ops.experts_out(**good, out=torch.zeros(1, H).bfloat16().expand(M, H))
    for name, shape in (("gate_up_bias", (E, 2 * N)), ("down_bias", (E, H))):
        bias = torch.zeros(max(E * shape[1], M * H)).bfloat16()
        with pytest.raises(ValueError, match=f"out: overlaps {name}"):
            ops.experts_out(**good, **{name: bias[: E * shape[1]].view(shape)}, out=bias[: M * H].view(M, H))
    with pytest.raises(ValueError, match=r"out: overlaps down\[0\]"):
        ops.experts_out(**good, out=good["down"][0].view(-1)[: M * H].view(M, H))
    want = ops.experts(**good)
    hidden = good["hidden"].clone()
    with pytest.raises((ValueError, RuntimeError), match="out"):
        ops.experts_out(**{**good, "hidden": hidden}, out=hidden)
    arena = torch.cat([hidden, torch.zeros_like(hidden)])  # disjoint rows of one buffer do not overlap
    ops.experts_out(**{**good, "hidden": arena[:M]}, out=arena[M:])
    assert torch.equal(arena[M:], want) and torch.equal(arena[:M], hidden)


# -------------------------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize(
    ("convert", "kind", "words"),
    [
        (lambda: ops.quantize(torch.zeros(2, 32), "mxfp4"), ValueError, ("weight", r"\[2, 32\]", "E, R, C")),
        (lambda: ops.quantize(torch.zeros(2, 2, 33), "mxfp4"), ValueError, ("weight", "33", "32")),
        (lambda: ops.quantize(torch.zeros(2, 2, 24), "nvfp4"), ValueError, ("weight", "24", "16")),
        (lambda: ops.quantize(torch.zeros(2, 2, 32).long(), "q4_0"), TypeError, ("weight", "got int64")),
        (lambda: ops.quantize(torch.zeros(2, 2, 32).double(), "mxfp4"), TypeError, ("weight", "got float64")),
        (lambda: ops.quantize(torch.zeros(2, 2, 32).int(), "bf16"), TypeError, ("weight", "(?i)int")),
        (
            lambda: ops.dequantize([torch.zeros(2, 2, 32)], "f32", dtype=torch.float64),
            TypeError,
            ("dtype", "got float64"),
        ),
        (
            lambda: ops.dequantize([torch.zeros(2, 2, 32)], "f32", dtype=torch.int8),
            TypeError,
            ("dtype", "got int8"),
        ),
        # With no tensor at all torch has nothing to dispatch on, and says so itself.
        (
            lambda: ops.dequantize([], "f32", dtype=torch.float32),
            (ValueError, NotImplementedError),
            ("weight|empty list",),
        ),
        (
            lambda: ops.dequantize([torch.zeros(2, 2, 32)] * 2, "f32", dtype=torch.float32),
            ValueError,
            ("weight", "f32", "1", "2"),
        ),
        (lambda: ops.dequantize([torch.zeros(2, 32)], "f32", dtype=torch.float32), ValueError, (r"weight\[0\]",)),
        (
            lambda: ops.dequantize([torch.zeros(2, 2, 32)], "bf16", dtype=torch.float32),
            TypeError,
            (r"weight\[0\]", "(?i)bf"),
        ),
        (
            lambda: ops.dequantize(
                [torch.zeros(2, 2, 16).byte(), torch.zeros(2, 2, 2).byte()], "mxfp4", dtype=torch.float32
            ),
            ValueError,
            (r"weight\[1\]", r"\[2, 2, 2\]", r"\[2, 2, 1\]"),
        ),
    ],
)
def test_conversions(convert: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as error:
        convert()
    for word in words:
        assert re.search(word, str(error.value)), str(error.value)


def test_conversions_refuse_grad() -> None:
    w = torch.zeros(1, 32, 32, requires_grad=True)
    for convert in (lambda: ops.quantize(w, "bf16"), lambda: ops.dequantize([w], "f32", dtype=torch.float32)):
        with pytest.raises(RuntimeError, match=r"weight.*grad"):
            convert()
        with torch.no_grad():
            convert()


# ------------------------------------------------------------------------------------------------------------ runtime


@pytest.mark.parametrize("n", [0, -1, -(2**40)])
def test_thread_numbers(n: int) -> None:
    with pytest.raises(ValueError, match=str(n)):
        ops.set_num_threads(n)


def test_absurd_thread_number() -> None:
    before = ops.get_num_threads()
    try:
        with pytest.raises((ValueError, RuntimeError)):
            ops.set_num_threads(2**40)
        assert ops.get_num_threads() == before
    finally:
        ops.set_num_threads(before)


@pytest.mark.parametrize("name", ["avx3", "", "AVX2", "best"])
def test_unknown_tier(name: str) -> None:
    with pytest.raises(ValueError, match="scalar") as error:
        ops.set_tier(name)
    assert name in str(error.value) and "auto" in str(error.value)


def test_failing_calls_leave_everything_usable() -> None:
    good = call()
    want = ops.experts(**good)
    for _ in range(200):
        with pytest.raises(ValueError, match="format"):
            ops.experts(**{**good, "format": "no"})
    assert torch.equal(ops.experts(**good), want)
