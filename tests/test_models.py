"""The experts of real model code (transformers, random weights from a config) against the operator on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from formats import FORMATS, Bank, ops, rng
from torch import Tensor


def randomize(module: torch.nn.Module, seed: int) -> None:
    g = rng(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)


def routes(m: int, k: int, e: int) -> tuple[Tensor, Tensor]:
    g = rng(2)
    weights, ids = torch.topk(torch.softmax(torch.randn(m, e, generator=g), -1), k)
    return ids, weights / weights.sum(-1, keepdim=True)


def qwen3_moe() -> tuple[torch.nn.Module, Bank]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3)
    module = Qwen3MoeExperts(config)
    randomize(module, 0)
    f = FORMATS["f32"]
    return module, Bank(f, [module.gate_up_proj.data], [module.down_proj.data], None, {"activation": "silu"})


def gpt_oss() -> tuple[torch.nn.Module, Bank]:
    """transformers keeps [E, H, 2I] and [E, I, H], gate and up interleaved, with biases."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=96, intermediate_size=64, num_local_experts=8, num_experts_per_tok=4)
    module = GptOssExperts(config)
    randomize(module, 1)
    with torch.no_grad():
        module.gate_up_proj.mul_(10)  # so that the clamps act
    kwargs = {
        "activation": "swigluoai",
        "alpha": getattr(module, "alpha", 1.702),
        "limit": module.limit,
        "interleaved": True,
        "gate_up_bias": module.gate_up_proj_bias.data,
        "down_bias": module.down_proj_bias.data,
    }
    gate_up, down = (p.data.mT.contiguous() for p in (module.gate_up_proj, module.down_proj))
    return module, Bank(FORMATS["f32"], [gate_up], [down], None, kwargs)


MODELS = [qwen3_moe, gpt_oss]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("m", [1, 7, 33])
def test_experts_module(model: Callable[[], tuple[torch.nn.Module, Bank]], m: int, tier: str) -> None:
    module, bank = model()
    k = 3 if model is qwen3_moe else 4
    hidden = torch.randn(m, 96, generator=rng(3))
    ids, weights = routes(m, k, 8)
    with torch.no_grad():
        out = bank.check(hidden, ids, weights)
        theirs = module(hidden, ids, weights)
    if model is gpt_oss:
        gate = hidden[0] @ module.gate_up_proj[ids[0, 0], :, 0::2]
        assert gate.max() > module.limit, "the case must drive the clamp"
    # Both are float32 sums of the same products: the distance is bounded by twice the reference's own bound.
    bound = 2 * bank.reference(hidden, ids, weights).bound + 2.0**-20 * theirs.double().abs()
    assert ((out.double() - theirs.double()).abs() <= bound).all()


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_block_of_the_model(model: Callable[[], tuple[torch.nn.Module, Bank]]) -> None:
    """The model's own sparse block, router included, with its experts replaced by the operator."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    if model is qwen3_moe:
        config = Qwen3MoeConfig(hidden_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3)
        block: torch.nn.Module = Qwen3MoeSparseMoeBlock(config)
    else:
        config = GptOssConfig(hidden_size=96, intermediate_size=64, num_local_experts=8, num_experts_per_tok=4)
        block = GptOssMLP(config)
    config._experts_implementation = "eager"
    randomize(block, 4)
    module, bank = model()
    block.experts.load_state_dict(module.state_dict())
    hidden = torch.randn(2, 5, 96, generator=rng(5))

    class Op(torch.nn.Module):
        calls = 0

        def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            self.calls += 1
            return bank(hidden, ids, weights)

    with torch.no_grad():
        theirs = block(hidden)
        block.experts = Op()
        ours = block(hidden)
    assert block.experts.calls == 1
    pick = (lambda r: r[0]) if isinstance(theirs, tuple) else (lambda r: r)
    torch.testing.assert_close(pick(ours), pick(theirs), rtol=1e-3, atol=1e-3 * pick(theirs).abs().max().item())


def test_gpt_oss_checkpoint_layout(tier: str) -> None:
    """A gpt-oss checkpoint's own tensors (blocks [E, 2I, H/32, 16] and scales) are a bank as they are, by a view."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    module, bank = gpt_oss()
    up, down = FORMATS["mxfp4"].make(rng(6), 8, 128, 96), FORMATS["mxfp4"].make(rng(7), 8, 96, 64)
    blocks = up[0].reshape(8, 128, 3, 16), down[0].reshape(8, 96, 2, 16)
    with torch.no_grad():
        module.gate_up_proj.copy_(convert_moe_packed_tensors(blocks[0], up[1], dtype=torch.float32))
        module.down_proj.copy_(convert_moe_packed_tensors(blocks[1], down[1], dtype=torch.float32))
    packed = Bank(FORMATS["mxfp4"], [blocks[0].view(8, 128, 48), up[1]], [blocks[1].view(8, 96, 32), down[1]])
    packed.kwargs = bank.kwargs
    assert packed.gate_up[0].data_ptr() == blocks[0].data_ptr()
    hidden = torch.randn(5, 96, generator=rng(8))
    ids, weights = routes(5, 4, 8)
    out = packed.check(hidden, ids, weights)
    with torch.no_grad():
        theirs = module(hidden, ids, weights).double()
    bound = 2 * packed.reference(hidden, ids, weights).bound + 2.0**-20 * theirs.abs()
    assert ((out.double() - theirs).abs() <= bound).all()


def test_safetensors_bank_in_place(tmp_path, tier: str) -> None:
    """A bank loaded from a safetensors file, whose tensors start wherever the header ends."""
    from formats import make_bank, make_inputs
    from safetensors.torch import load_file, save_file

    for name in ("mxfp4", "nvfp4", "fp8_block", "bf16", "q4_0"):
        bank = make_bank(name, 3, 64, 64)
        parts = {f"{w}{j}": p for w in ("gate_up", "down") for j, p in enumerate(getattr(bank, w))}
        save_file({"a": torch.zeros(3, dtype=torch.uint8), **parts}, tmp_path / "bank.safetensors")
        loaded = load_file(tmp_path / "bank.safetensors")
        args = make_inputs(4, 64, 2, 3)
        up, down = ([loaded[f"{w}{j}"] for j in range(len(getattr(bank, w)))] for w in ("gate_up", "down"))
        assert torch.equal(ops.experts(*args, up, down, name), bank(*args))
