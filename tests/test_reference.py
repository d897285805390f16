"""The references themselves, against torch, gguf and transformers: none of the operators is called here."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import reference
import torch
from formats import FORMATS, rng
from reference import E2M1, E4M3, E8M0


def test_e4m3_table_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(E4M3, codes.double().numpy())
    assert np.signbit(E4M3[0x80])


def test_e2m1_and_e8m0_tables() -> None:
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    np.testing.assert_array_equal(E8M0, codes.double().numpy())


def test_round_e4m3_is_torchs_cast() -> None:
    x = torch.cat([torch.randn(20000, generator=rng(0)) * s for s in (1e-3, 0.02, 1.0, 60.0)]).clamp(-448, 448)
    middle = torch.from_numpy((E4M3[:126] + E4M3[1:127]) / 2).float()  # every tie
    x = torch.cat([x, middle, -middle])
    np.testing.assert_array_equal(reference.round_e4m3(x.numpy()), x.to(torch.float8_e4m3fn).double().numpy())


def test_round_e2m1() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert reference.round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]  # the even mantissa; 6 saturates
    x = np.linspace(-7, 7, 9973)
    nearest = np.abs(x[:, None] - E2M1[None]).min(1)
    np.testing.assert_allclose(np.abs(reference.round_e2m1(x) - x), nearest, atol=1e-12)


def test_q4_0_decoder_is_ggufs() -> None:
    parts = FORMATS["q4_0"].make(rng(3), 2, 5, 96)
    theirs = gguf.quants.dequantize(parts[0].numpy(), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(reference.decode("q4_0", parts).float().numpy(), theirs)


def test_mxfp4_decoder_is_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, scale = FORMATS["mxfp4"].make(rng(4), 3, 10, 128)
    theirs = convert_moe_packed_tensors(packed.reshape(3, 10, 4, 16), scale, dtype=torch.float32)  # [E, C, R]
    torch.testing.assert_close(reference.decode("mxfp4", [packed, scale]).float(), theirs.mT, rtol=0, atol=0)


def test_fp8_activation_by_hand() -> None:
    x = np.zeros(130, np.float32)
    x[0], x[1], x[128], x[129] = 448.0, 1.0625, 449.0, 3.0
    y = reference.fp8_activation(x)
    # The first block's scale is 1 (1.0625 is a tie: to even); the second, partial one's is 2: 449/2 -> 224.
    assert y[[0, 1, 128, 129]].tolist() == [448.0, 1.0, 448.0, 3.0]
    assert reference.fp8_activation(np.full(4, 1e-10, np.float32)).max() == 0.0  # the floor of 1e-4: scale 2^-22
    torch_rule = torch.randn(6, 256, generator=rng(5))
    b = torch_rule.reshape(6, 2, 128)
    s = torch.exp2(torch.ceil(torch.log2(b.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    want = ((b / s).clamp(-448, 448).to(torch.float8_e4m3fn).double() * s).reshape(6, 256)
    np.testing.assert_array_equal(reference.fp8_activation(torch_rule.numpy()), want.numpy())


def test_q8_0_activation_is_ggufs() -> None:
    x = (torch.randn(64, 32, generator=rng(6)) * torch.logspace(-3, 3, 64)[:, None]).numpy()
    theirs = gguf.quants.dequantize(
        gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    np.testing.assert_array_equal(reference.q8_0_activation(x).astype(np.float32), theirs)
    huge = np.full(32, 1e30, np.float32)
    np.testing.assert_allclose(reference.q8_0_activation(huge), huge, rtol=1e-6)  # f16 would make it infinite


@pytest.mark.parametrize(
    ("name", "gate", "up", "limit", "want"),
    [
        ("swigluoai", 1.0, 1.0, 7.0, 1.69159),
        ("swigluoai", 20.0, 20.0, 7.0, 55.9996),
        ("swiglu_clamp", 20.0, 20.0, 10.0, 99.9955),
    ],
)
def test_activation_numbers(name: str, gate: float, up: float, limit: float, want: float) -> None:
    value, _ = reference.activate(name, torch.tensor([gate]).double(), torch.tensor([up]).double(), limit=limit)
    assert abs(value.item() - want) < 5e-5 * want


def test_activations_are_torchs() -> None:
    g = torch.linspace(-12, 12, 481, dtype=torch.float64)
    one = torch.ones_like(g)
    F = torch.nn.functional
    wants = {
        "silu": F.silu(g),
        "gelu": F.gelu(g),
        "gelu_tanh": F.gelu(g, approximate="tanh"),
        "relu2": F.relu(g) ** 2,
    }
    for name, want in wants.items():
        torch.testing.assert_close(reference.activate(name, g, one)[0], want, rtol=1e-9, atol=1e-12)


def test_bound_can_fail() -> None:
    """A result off by a hundredth, or from activations of 8 bits, is caught; the exact one rounded passes."""
    from formats import make_bank, make_inputs

    bank = make_bank("f32", 4, 64, 64)
    args = make_inputs(3, 64, 2, 4, dtype=torch.float32)
    ref = bank.reference(*args)
    reference.assert_close(ref.value.float(), ref)
    with pytest.raises(AssertionError, match="out of bound"):
        reference.assert_close((ref.value * (1 + 1e-2)).float(), ref)
    step = args[0].abs().amax(-1, keepdim=True) / 127
    int8 = bank.reference((args[0] / step).round() * step, *args[1:]).value
    with pytest.raises(AssertionError, match="out of bound"):
        reference.assert_close(int8.float(), ref)
    with pytest.raises(AssertionError, match="NaN"):
        reference.assert_close((ref.value * float("nan")).float(), ref)
