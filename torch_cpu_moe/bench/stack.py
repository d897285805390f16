"""A stack of MoE layers, each with its own memory: norm, router, routed experts, residual; attention if asked for."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .contend import Attention
from .measure import Bank, distinct, make_bank, progress
from .memory import Cut
from .presets import Geometry


@dataclass
class Layer:
    bank: Bank
    router: Tensor
    attention: Attention | None


@dataclass
class Times:
    """Of one step through all layers, in seconds, and the bytes of experts that it touched."""

    whole: float
    layers: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    bytes: int = 0


class Stack:
    def __init__(self, name: str, geometry: Geometry, cut: Cut, tokens: int, context: int | None) -> None:
        """`context`: tokens in each layer's KV cache; None: no attention is ever run."""
        generator = torch.Generator().manual_seed(0)
        self._geometry, self._tokens, self._generator = geometry, tokens, generator
        self._layers = []
        for i in range(cut.layers):
            progress(f"making layer {i + 1} of {cut.layers} ({name})")
            router = torch.randn(geometry.hidden, cut.experts, generator=generator) * geometry.hidden**-0.5
            self._layers.append(
                Layer(
                    make_bank(name, geometry, generator, cut.experts),
                    router.to(torch.bfloat16),
                    Attention(tokens, context, generator) if context else None,
                )
            )
        progress("")
        self.expert_bytes = self._layers[0].bank.expert_bytes

    def step(self, precision: str, attention: bool) -> Times:
        """M tokens through all layers."""
        shape, clock = self._geometry, time.perf_counter
        hidden = torch.randn(self._tokens, shape.hidden, generator=self._generator).to(torch.bfloat16)
        chosen = []
        times = Times(0.0)
        start = clock()
        for layer in self._layers:
            began = clock()
            if attention and layer.attention is not None:
                layer.attention.run()
                times.attention.append(clock() - began)
            normed = functional.rms_norm(hidden, (shape.hidden,))
            scores = torch.softmax((normed @ layer.router).float(), -1)
            weights, ids = scores.topk(shape.top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            before = clock()
            out = layer.bank.run(normed, ids, weights, precision)
            times.experts.append(clock() - before)
            hidden = hidden + out
            times.layers.append(clock() - began)
            chosen.append(ids)
        times.whole = clock() - start
        times.bytes = sum(distinct(ids) for ids in chosen) * self.expert_bytes
        return times


@dataclass
class Sample:
    """A measurement: some steps, with a plain read of as many bytes after each."""

    tokens_per_s: float
    gb_per_s: float  # in the experts' operator
    read: float
    experts_part: float  # of the time
    layer_seconds: list[float]
    attention_ms: float
    stream_gb_per_s: float | None = None

    @classmethod
    def of(cls, steps: list[Times], reads: list[float], tokens: int) -> Sample:
        return cls(
            tokens_per_s=tokens / statistics.median(t.whole for t in steps),
            gb_per_s=statistics.median(t.bytes / sum(t.experts) for t in steps) / 1e9,
            read=statistics.median(reads),
            experts_part=statistics.median(sum(t.experts) / t.whole for t in steps),
            layer_seconds=[seconds for t in steps for seconds in t.layers],
            attention_ms=1e3 * statistics.median([s for t in steps for s in t.attention] or [0.0]),
        )
