"""opcheck, torch.compile, torch.export, AOTInductor, autocast: the operators as the compiler stack sees them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import NAMES, Bank, make_bank, make_inputs, ops
from reference import assert_bits
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A bank as an nn.Module: plain tensors in buffers."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.n = len(bank.gate_up), len(bank.down)
        for j, part in enumerate([*bank.gate_up, *bank.down]):
            self.register_buffer(f"part{j}", part)
        self.format, self.kwargs = bank.fmt.name, bank.kwargs

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parts = [getattr(self, f"part{j}") for j in range(sum(self.n))]
        out = ops.experts(hidden, ids, weights, parts[: self.n[0]], parts[self.n[0] :], self.format, **self.kwargs)
        return hidden + out


class Counter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


# ------------------------------------------------------------------------------------------------------------ opcheck


def opcheck(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch.library.opcheck, all tests. test_schema compares copies of the inputs by arithmetic that torch lacks for
    float8: without it where a part is float8 (tests/test_routing.py checks for every format that inputs stay)."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    if any(isinstance(t, Tensor) and t.dtype == torch.float8_e4m3fn for t in leaves):
        tests.remove("test_schema")
    torch.library.opcheck(op, args, kwargs, test_utils=tests)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_experts(name: str) -> None:
    bank = make_bank(name, 3, 64, 32, bias=True, activation="swigluoai", limit=7.0)
    for m, layout in ((3, "plain"), (1, "plain"), (4, "transposed")):
        hidden, ids, weights = make_inputs(m, 64, 2, 3)
        if layout == "transposed":
            hidden = hidden.T.contiguous().T
        args = (hidden, ids, weights, bank.gate_up, bank.down, name)
        opcheck(ops.experts.default, args, bank.kwargs)
        out = torch.zeros(m, 64, dtype=hidden.dtype)
        opcheck(ops.experts_out.default, args, {**bank.kwargs, "out": out})


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_conversions(name: str) -> None:
    w = torch.randn(2, 6, 64)
    # quantize's result may hold float8, which test_schema cannot compare either.
    if not any(p.dtype == torch.float8_e4m3fn for p in ops.quantize(w, name)):
        opcheck(ops.quantize.default, (w, name), {})
    else:
        tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(ops.quantize.default, (w, name), {}, test_utils=tests)
    opcheck(ops.dequantize.default, (ops.quantize(w, name), name), {"dtype": torch.bfloat16})


@pytest.mark.parametrize("name", NAMES)
def test_fake_metadata_is_the_real_one(name: str) -> None:
    """OP-01: shape, dtype, strides and device of fakes are those of the real results for every layout of inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    bank = make_bank(name, 3, 64, 32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden, ids, weights = make_inputs(4, 64, 2, 3, dtype=dtype)
        layouts = [
            hidden.T.contiguous().T,
            torch.cat([hidden, hidden], 1)[:, 5:69],
            torch.cat([hidden, hidden])[::2],
            hidden[:1].expand(4, 64),
            hidden[:, :1].expand(4, 64),
            hidden[:0],
            hidden[:1],
        ]
        for view in layouts:
            m = view.shape[0]
            inputs = view, ids[:m], weights[:m]
            real = bank(*inputs)
            with FakeTensorMode() as mode:
                args = [mode.from_tensor(t) for t in inputs]
                parts = [[mode.from_tensor(t) for t in p] for p in (bank.gate_up, bank.down)]
                fake = ops.experts(*args, *parts, name)
            same = ("shape", "dtype", "device")
            assert all(getattr(fake, a) == getattr(real, a) for a in same) and fake.stride() == real.stride()
    w = torch.randn(2, 64, 64)
    for view in (w, w.mT, w.transpose(0, 1)[:, :1]):
        real_parts = ops.quantize(view, name)
        real_back = ops.dequantize(real_parts, name, dtype=torch.float16)
        with FakeTensorMode() as mode:
            fake_parts = ops.quantize(mode.from_tensor(view), name)
            fake_back = ops.dequantize(fake_parts, name, dtype=torch.float16)
        for f, r in zip([*fake_parts, fake_back], [*real_parts, real_back], strict=True):
            assert f.shape == r.shape and f.dtype == r.dtype and f.stride() == r.stride()


def test_fake_kernels_refuse_what_the_real_ones_refuse() -> None:
    """A wrong shape or name surfaces while tracing, with the same type of exception."""
    good = make_bank("mxfp4", 3, 64, 32)
    hidden, ids, weights = (t.to("meta") for t in make_inputs(4, 64, 2, 3))
    up, down = ([p.to("meta") for p in parts] for parts in (good.gate_up, good.down))
    for kind, args in (
        (ValueError, (hidden, ids, weights, up, down, "nope")),
        (ValueError, (hidden, ids, weights, up[:1], down, "mxfp4")),
        (ValueError, (hidden[:, :32], ids, weights, up, down, "mxfp4")),
        (ValueError, (hidden, ids, weights[:, :1], up, down, "mxfp4")),
        (TypeError, (hidden.double(), ids, weights, up, down, "mxfp4")),
        (TypeError, (hidden, ids.float(), weights, up, down, "mxfp4")),
    ):
        with pytest.raises(kind):
            ops.experts(*args)


# ------------------------------------------------------------------------------------------------------------ compile


@pytest.mark.parametrize("name", NAMES)
def test_compile_static(name: str) -> None:
    """fullgraph, by Inductor for one format of each kind and by AOT autograd alone for the rest (seconds each)."""
    layer = Layer(make_bank(name, 3, 64, 32, bias=True))
    args = make_inputs(4, 64, 2, 3)
    backend = "inductor" if name in ("bf16", "mxfp4") else "aot_eager"
    assert_bits(torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)(*args), layer(*args))


def test_compile_dynamic_tokens() -> None:
    """One graph for every M from 2 up; 0 and 1 may specialise, as everywhere in torch."""
    layer = Layer(make_bank("mxfp4", 4, 64, 32))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (3, 64, 2, 17, 1, 0, 5):
        args = make_inputs(m, 64, 2, 4)
        assert_bits(compiled(*args), layer(*args), f"M={m}")


def test_dynamic_tokens_recompile_once() -> None:
    """OP-04: without a hint the second M makes the graph dynamic, and no further M from 2 to 64 compiles again."""
    layer = Layer(make_bank("bf16", 4, 32, 32))
    counter = Counter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m in (8, 9, 2, 64, 33, 5):
        args = make_inputs(m, 32, 2, 4)
        assert_bits(compiled(*args), layer(*args))
    assert len(counter.graphs) == 2


def test_twelve_layers_one_graph() -> None:
    """Banks are graph inputs, so identical layers share a graph; a constant handle would compile each of them."""
    layers = [Layer(make_bank("mxfp4", 4, 64, 32, seed=s)) for s in range(12)]
    counter = Counter()
    step = torch.compile(lambda layer, *args: layer(*args), fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=True, error_on_recompile=True):
        args = make_inputs(4, 64, 2, 4)
        outs = [step(layer, *args) for layer in layers]
    assert len(counter.graphs) == 1
    for layer, out in zip(layers, outs, strict=True):
        assert_bits(out, layer(*args))
    assert not torch.equal(outs[0], outs[1])


def test_the_bank_passed_is_the_bank_used() -> None:
    """OP-04: after swapping banks, and after writing into one, the compiled function uses the new weights."""
    a, b = make_bank("bf16", 4, 32, 32, seed=1), make_bank("bf16", 4, 32, 32, seed=2)
    compiled = torch.compile(
        lambda args, up, down: ops.experts(*args, up, down, "bf16") * 1.0, fullgraph=True, dynamic=False
    )
    args = make_inputs(3, 32, 2, 4)
    for bank in (a, b, a):
        assert_bits(compiled(args, bank.gate_up, bank.down), bank(*args))
    a.down[0].mul_(2)
    assert_bits(compiled(args, a.gate_up, a.down), a(*args))


def test_strided_hidden_compiled() -> None:
    """OP-01: inductor's own stride asserts hold when hidden is a transposed or sliced intermediate."""
    bank = make_bank("bf16", 4, 32, 32)
    hidden, ids, weights = make_inputs(6, 32, 2, 4)

    def f(h: Tensor) -> Tensor:
        out = ops.experts((h * 2).T, ids, weights, bank.gate_up, bank.down, "bf16")
        return out.view(-1) + ops.experts((h.T + 1)[:, ::1], ids, weights, bank.gate_up, bank.down, "bf16").view(-1)

    wide = hidden.T.contiguous()
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(wide), f(wide), rtol=2**-7, atol=1e-2)


def test_out_is_a_slice_of_a_buffer() -> None:
    """OP-03: the buffer is read before and after, its other rows stay, eager and compiled agree."""
    bank = make_bank("mxfp4", 4, 64, 32)
    args = make_inputs(3, 64, 2, 4)

    def f(buffer: Tensor, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        before = buffer.sum(1)
        ops.experts_out(hidden, ids, weights, bank.gate_up, bank.down, "mxfp4", out=buffer[2:5])
        buffer[5:].add_(1)
        return torch.cat([before, buffer.sum(1), buffer[2:5].reshape(-1)])

    eager, compiled = torch.arange(8 * 64).reshape(8, 64).bfloat16(), torch.arange(8 * 64).reshape(8, 64).bfloat16()
    want = f(eager, *args)
    got = torch.compile(f, fullgraph=True)(compiled, *args)
    assert_bits(compiled, eager, "buffer")
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert_bits(eager[2:5], bank(*args))


def test_autocast_and_inference_mode() -> None:
    """OP-04: autocast neither casts the bank nor breaks the graph."""
    layer = Layer(make_bank("f32", 4, 64, 32))
    args = make_inputs(4, 64, 2, 4, dtype=torch.float32)
    want = layer(*args)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for f in (layer, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_bits(f(*args), want)
        with torch.inference_mode():
            assert_bits(f(*args), want)


def test_compiled_errors_are_the_eager_ones() -> None:
    bank = make_bank("bf16", 4, 32, 32)
    hidden, ids, weights = make_inputs(3, 32, 2, 4)
    compiled = torch.compile(
        lambda h, i, w: ops.experts(h, i, w, bank.gate_up, bank.down, "bf16"), fullgraph=True, backend="aot_eager"
    )
    compiled(hidden, ids, weights)
    with pytest.raises(IndexError, match=r"topk_ids.*(99|10\d)"):
        compiled(hidden, ids + 99, weights)
    with pytest.raises(Exception, match="topk_weights"):
        compiled(hidden, ids, weights[:, :1])


# ------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "fp8_block", "q4_0"])
def test_export_dynamic_saved_loaded_run(name: str, tmp_path: Path) -> None:
    layer = Layer(make_bank(name, 4, 64, 32, activation="swigluoai", limit=7.0))
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(layer, make_inputs(6, 64, 2, 4), dynamic_shapes=shapes)
    assert "cpu_moe.experts" in program.graph_module.code
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for m in (6, 1, 2, 31):
        args = make_inputs(m, 64, 2, 4)
        assert_bits(loaded(*args), layer(*args), f"M={m}")


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    """Once is enough: a C++ package that calls the operator, with dynamic M."""
    layer = Layer(make_bank("mxfp4", 4, 64, 32))
    tokens = torch.export.Dim("tokens", min=1, max=512)
    shapes = ({0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(layer, make_inputs(6, 64, 2, 4), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    runner = torch._inductor.aoti_load_package(path)
    for m in (6, 2, 100):
        args = make_inputs(m, 64, 2, 4)
        assert_bits(runner(*args), layer(*args), f"M={m}")


# ------------------------------------------------------------------------------------------------------- no backward


class Routed(torch.nn.Module):
    """A router with parameters before the experts, as in a model whose owner forgot no_grad()."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(64, 4)
        self.bank = make_bank("bf16", 4, 64, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(hidden).softmax(-1), 2)
        out: torch.Tensor = self.bank(hidden, ids, weights)
        return out


@pytest.mark.parametrize("how", ["eager", "compile", "export"])
def test_gradients_are_never_dropped_in_silence(how: str) -> None:
    torch._dynamo.reset()
    model, hidden = Routed(), torch.randn(3, 64)
    run = {
        "eager": lambda: model(hidden),
        "compile": lambda: torch.compile(model, fullgraph=True)(hidden),
        "export": lambda: torch.export.export(model, (hidden,)),
    }[how]
    with pytest.raises(RuntimeError, match="topk_weights: requires grad, but cpu_moe operators have no backward"):
        run()
    with torch.no_grad():
        run()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"activation": "swish"}, ValueError, "activation: unknown 'swish'"),
        ({"precision": "int8"}, ValueError, "precision: unknown 'int8'"),
        ({"limit": 7.0}, ValueError, "limit: expected .* swigluoai"),
        ({"limit": -1.0, "activation": "swigluoai"}, ValueError, "limit: expected a number above 0"),
        ({"alpha": float("inf")}, ValueError, "alpha: expected a finite number"),
        ({"gate_up_bias": torch.zeros(4)}, ValueError, "gate_up_bias: expected shape"),
        ({"down_bias": torch.zeros(4, 64, dtype=torch.float64)}, TypeError, "down_bias: expected .* got float64"),
        ({"apply_router_weight_on_input": True}, ValueError, "expected k = 1, got k = 2"),
        ({"down": [torch.zeros(4, 64, 32, dtype=torch.int16)]}, TypeError, r"down\[0\]: expected bfloat16, got int16"),
    ],
)
def test_what_cannot_run_does_not_compile(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Said while tracing, before a long compilation or a saved program."""
    hidden, ids, weights = make_inputs(3, 64, 2, 4)
    bank = make_bank("bf16", 4, 64, 32)
    call = {"gate_up": bank.gate_up, "down": bank.down, "format": "bf16", **change}
    with torch.no_grad(), pytest.raises((kind, RuntimeError), match=message):
        torch.compile(lambda x: ops.experts(x, ids, weights, **call), fullgraph=True, backend="eager")(hidden)
