"""Geometries of real models, from their public config.json files.

A name that ends in "-like" says that a value of it is not certain. In config.json, `hidden` is hidden_size;
`intermediate` is moe_intermediate_size (gpt-oss, MiniMax: intermediate_size); `experts` is num_experts (Qwen3),
num_local_experts (gpt-oss, MiniMax) or n_routed_experts (the others); `top_k` is num_experts_per_tok; `layers` is
num_hidden_layers less first_k_dense_replace, layers with experts only; `limit` is swiglu_limit. Shared experts are not
counted: they are dense.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Shape and arithmetic of a model's MoE layers."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    formats: tuple[str, ...]  # as published, then what it is usually run in
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    interleaved: bool = False

    @property
    def shape(self) -> str:
        return f"H={self.hidden} I={self.intermediate} E={self.experts} top-{self.top_k}"

    def flops(self, tokens: int) -> int:
        """Of the three projections; a multiplication and an addition are two."""
        return 2 * 3 * self.hidden * self.intermediate * tokens * self.top_k


def _gpt_oss(name: str, experts: int, layers: int) -> Geometry:
    return Geometry(name, 2880, 2880, experts, 4, layers, ("mxfp4",), "swigluoai", 7.0, bias=True, interleaved=True)


PRESETS = {
    preset.name: preset
    for preset in (
        Geometry("Qwen3-30B-A3B", 2048, 768, 128, 8, 48, ("bf16", "fp8_block", "q4_0", "mxfp4")),
        Geometry("Qwen3-235B-A22B", 4096, 1536, 128, 8, 94, ("bf16", "fp8_block", "q4_0", "nvfp4")),
        _gpt_oss("gpt-oss-20b", 32, 24),
        _gpt_oss("gpt-oss-120b", 128, 36),
        Geometry("DeepSeek-V3", 7168, 2048, 256, 8, 58, ("fp8_block", "nvfp4", "q4_0")),
        # num_hash_layers: the first 3 route by token, through the same experts.
        Geometry("DeepSeek-V4-Flash-like", 4096, 2048, 256, 6, 43, ("ds_fp4",), "swiglu_clamp", 10.0),
        Geometry("GLM-4.5", 5120, 1536, 160, 8, 89, ("bf16", "q4_0")),
        Geometry("GLM-4.5-Air", 4096, 1408, 128, 8, 45, ("bf16", "q4_0", "mxfp4")),
        Geometry("GLM-4.6", 5120, 1536, 160, 8, 89, ("bf16", "q4_0")),
        Geometry("MiniMax-M2", 3072, 1536, 256, 8, 62, ("fp8_block", "q4_0", "nvfp4")),
        Geometry("Kimi-K2", 7168, 2048, 384, 8, 60, ("fp8_block", "q4_0", "nvfp4")),
    )
}

# What the isolated benchmarks take where nothing else is asked for: experts of a size that many models have.
DEFAULT = Geometry("no model's", 2048, 1024, 64, 8, 1, ())
