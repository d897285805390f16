"""Activations and clamps by their numbers (NUM-07, NUM-08), through every format and tier."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from formats import FORMATS, Bank, make_bank, make_inputs
from reference import assert_bits
from torch import Tensor

GRID = [-20.0, -7.5, -1.0, 0.0, 1.0, 6.9, 7.1, 20.0]


def scalar_bank(name: str, **kwargs: Any) -> Bank:
    """hidden[0] is the gate and hidden[1] the up of one intermediate unit; result column 0 is act(gate, up)."""
    f = FORMATS[name]
    n = 32
    gate_up, down = torch.zeros(1, 2 * n, n), torch.zeros(1, n, n)
    gate_up[0, 0, 0] = gate_up[0, n, 1] = down[0, 0, 0] = 1
    return Bank(f, f.ints(gate_up), f.ints(down), None, kwargs)


def scalar_inputs(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.zeros(len(pairs), 32)
    hidden[:, :2] = torch.tensor(pairs)
    return hidden, torch.zeros(len(pairs), 1).long(), torch.ones(len(pairs), 1)


KINDS: list[dict[str, Any]] = [
    {"activation": "silu"},
    {"activation": "gelu"},
    {"activation": "gelu_tanh"},
    {"activation": "relu2"},
    *({"activation": "swigluoai", "alpha": a, "limit": x} for a in (1.0, 1.702) for x in (None, 7.0, 10.0)),
    *({"activation": "swiglu_clamp", "limit": x} for x in (None, 7.0, 10.0)),
]


@pytest.mark.parametrize("name", FORMATS)
def test_grid(name: str, tier: str) -> None:
    """NUM-08: gate only upper-bounded, up bounded on both sides, alpha and limit honoured by every path."""
    pairs = [(g, u) for g in GRID for u in GRID]
    for kind in KINDS:
        out = scalar_bank(name, **kind).check(*scalar_inputs(pairs), what=f"{name} {kind} on {tier}")
        assert (out[:, 1:] == 0).all()


@pytest.mark.parametrize(
    ("kind", "gate", "up", "want"),
    [
        ({"activation": "swigluoai", "limit": 7.0}, 1.0, 1.0, 1.69159),
        ({"activation": "swigluoai", "limit": 7.0}, 20.0, 20.0, 55.9996),
        ({"activation": "swiglu_clamp", "limit": 10.0}, 20.0, 20.0, 99.9955),
        (
            {"activation": "swigluoai", "limit": 7.0},
            -20.0,
            -20.0,
            2.0e-13,
        ),  # gate is not bounded below: not -7
        ({"activation": "swiglu_clamp", "limit": 7.0}, 7.0, -20.0, -48.9554),
        ({"activation": "swigluoai", "limit": 7.0}, 7.0, -20.0, -41.9997),  # (-7 + 1) * 7
        ({"activation": "silu"}, 20.0, 20.0, 400.0),
        ({"activation": "relu2"}, 3.0, -2.0, -18.0),
        ({"activation": "relu2"}, -3.0, -2.0, 0.0),
        ({"activation": "gelu"}, 1.0, 1.0, 0.841345),
        ({"activation": "gelu_tanh"}, 1.0, 1.0, 0.841192),
    ],
)
def test_numbers(kind: dict[str, Any], gate: float, up: float, want: float, tier: str) -> None:
    for name in ("f32", "bf16", "mxfp4", "nvfp4", "fp8_block", "q4_0"):
        out = scalar_bank(name, **kind)(*scalar_inputs([(gate, up)]))
        assert abs(out[0, 0].item() - want) <= 1e-4 * abs(want) + 1e-6, name


def test_no_limit_differs_from_every_limit(tier: str) -> None:
    args = scalar_inputs([(20.0, 20.0)])
    for activation in ("swigluoai", "swiglu_clamp"):
        free, tight = (scalar_bank("f32", activation=activation, limit=x)(*args)[0, 0] for x in (None, 7.0))
        assert free > 5 * tight


def test_alpha_is_ignored_by_swiglu_clamp(tier: str) -> None:
    """swiglu_clamp's alpha is 1 by definition; whatever is passed, its result is silu's with clamps."""
    args = scalar_inputs([(3.0, 2.0), (-1.0, 2.0)])
    silu = scalar_bank("f32", activation="silu")(*args)
    assert_bits(scalar_bank("f32", activation="swiglu_clamp", alpha=1.702)(*args), silu)


def test_a_curve(tier: str) -> None:
    """Each function along its whole range, in float32, to its own error bound."""
    gates = torch.cat([torch.linspace(-100, 100, 2001), torch.linspace(-2, 2, 401), torch.tensor([-1e4, 1e4, 1e-20])])
    for kind in KINDS:
        scalar_bank("f32", **kind).check(*scalar_inputs([(g, 1.0) for g in gates.tolist()]), what=f"{kind} on {tier}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(str(v) for v in k.values()))
def test_nan_gate_and_up_survive_the_clamp(kind: dict[str, Any], tier: str) -> None:
    """min and max instructions drop NaN in one operand order: a NaN must come out whichever side it is on."""
    nan = float("nan")
    out = scalar_bank("f32", **kind)(*scalar_inputs([(1.0, 1.0)]))
    assert out[0, 0].isfinite()
    for row in (0, 32):
        bank = scalar_bank("f32", **kind)
        bank.gate_up[0][0, row, 0] = nan
        assert bank(*scalar_inputs([(1.0, 1.0)]))[0, 0].isnan(), row


def test_infinite_gate(tier: str) -> None:
    """silu(-inf) is NaN by the formula and 0 by the limit; what is fixed here: +inf clamps to the limit."""
    bank = make_bank("f32", 1, 2, 1, activation="swigluoai", limit=7.0)
    bank.gate_up[0][:] = torch.tensor([[[3e38, 3e38], [0.0, 0.0]]])
    bank.down[0][:] = 1
    bank.kwargs["gate_up_bias"] = torch.tensor([[0.0, 1.0]])
    out = bank(torch.full((1, 2), 10.0), torch.zeros(1, 1).long(), torch.ones(1, 1))
    want, _ = reference.activate("swigluoai", torch.tensor([7.0]).double(), torch.tensor([1.0]).double(), limit=7.0)
    torch.testing.assert_close(out.double(), want.expand(1, 2), rtol=1e-6, atol=0)


def test_bias_goes_before_the_clamp(tier: str) -> None:
    bank = make_bank("bf16", 3, 64, 64, bias=True, activation="swigluoai", limit=1.0)
    bank.kwargs["gate_up_bias"] = bank.kwargs["gate_up_bias"] * 3
    bank.check(*make_inputs(4, 64, 2, 3, dtype=torch.float32))
