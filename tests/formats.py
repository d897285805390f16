"""The one matrix of weight formats: adding a format is one row in FORMATS and one decoder in reference.py.

Each row makes random parts (every code, realistic scales), extreme parts, and knows how to poison an expert with NaN.
A `Bank` joins two projections and checks the operator against the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import reference
import torch
from torch import Tensor

import torch_cpu_moe  # noqa: F401  registers the operators, in the programs that tests start too

ops = torch.ops.cpu_moe
Parts = list[Tensor]
Generator = torch.Generator


def rng(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def rand_bytes(g: Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.int32).to(torch.uint8)


# -------------------------------------------------------------------------------------- makers: (g, E, R, C) -> parts
# Scales are chosen so that a row of unit-variance activations gives values of order 1: activations then see both of
# their tails, and a wrong code, scale or position changes results far beyond the bound.


def _dense(dtype: torch.dtype) -> Callable[[Generator, int, int, int], Parts]:
    return lambda g, e, r, c: [(torch.randn(e, r, c, generator=g) * c**-0.5).to(dtype)]


def _mx(g: Generator, e: int, r: int, c: int) -> Parts:
    middle = 127 - round(torch.tensor(2.9 * c**0.5).log2().item())
    return [rand_bytes(g, e, r, c // 2), rand_bytes(g, e, r, c // 32, low=middle - 3, high=middle + 3)]


def _nv(g: Generator, e: int, r: int, c: int) -> Parts:
    scale = rand_bytes(g, e, r, c // 16, low=0x20, high=0x50) | rand_bytes(g, e, r, c // 16, high=2) << 7
    glob = torch.rand(e, r, generator=g) * 0.2 * c**-0.5 + 0.01 * c**-0.5  # another one for every row: NUM-06
    return [rand_bytes(g, e, r, c // 2), scale.view(torch.float8_e4m3fn), glob]


def _fp8(g: Generator, e: int, r: int, c: int) -> Parts:
    codes = rand_bytes(g, e, r, c, high=0x7F) | rand_bytes(g, e, r, c, high=2) << 7  # every code but the NaNs
    scale = (torch.rand(e, -(-r // 128), -(-c // 128), generator=g) + 0.1) * (0.02 * c**-0.5)
    return [codes.view(torch.float8_e4m3fn), scale]


def _fp8_bf16(g: Generator, e: int, r: int, c: int) -> Parts:
    codes, scale = _fp8(g, e, r, c)
    return [codes, scale.to(torch.bfloat16)]


def q4_0_parts(d: Tensor, nibbles: Tensor) -> Parts:
    """d [E, R, C/32] f16 and nibbles u8 [E, R, C/32, 16] (both as stored) to blocks [E, R, C/32*18]."""
    blocks = torch.cat([d.contiguous().view(torch.uint8).reshape(*d.shape, 2), nibbles], dim=-1)
    return [blocks.reshape(*d.shape[:-1], -1)]


def _q4_0(g: Generator, e: int, r: int, c: int) -> Parts:
    d = (torch.randn(e, r, c // 32, generator=g) * 0.2 * c**-0.5).half()
    return q4_0_parts(d, rand_bytes(g, e, r, c // 32, 16))


# ------------------------------------------------------- exact encodings of w [E, R, C] in {-1, 0, 1}


def _int_codes(w: Tensor, one: int, sign: int) -> Tensor:
    return torch.where(w == 0, 0, torch.where(w > 0, one, one | sign)).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., C] codes to [..., C/2] bytes, the first of each pair in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _mx_ints(w: Tensor) -> Parts:
    scale = torch.full((*w.shape[:2], w.shape[2] // 32), 127, dtype=torch.uint8)
    return [pack_nibbles(_int_codes(w, 2, 8)), scale]


def _nv_ints(w: Tensor) -> Parts:
    scale = torch.ones(*w.shape[:2], w.shape[2] // 16).to(torch.float8_e4m3fn)
    return [pack_nibbles(_int_codes(w, 2, 8)), scale, torch.ones(w.shape[:2])]


def _fp8_ints(w: Tensor) -> Parts:
    e, r, c = w.shape
    return [w.to(torch.float8_e4m3fn), torch.ones(e, -(-r // 128), -(-c // 128))]


def _q4_0_ints(w: Tensor) -> Parts:
    q = (w + 8).to(torch.uint8).reshape(*w.shape[:2], -1, 2, 16)
    return q4_0_parts(torch.ones(q.shape[:3]).half(), q[..., 0, :] | q[..., 1, :] << 4)


# --------------------------------------------------------------------------------------- poison: NaN in whole experts


def _poison_mx(parts: Parts, e: Any) -> None:
    parts[1][e] = 255


def _poison_floats(parts: Parts, e: Any) -> None:
    for part in parts:
        if part.dtype == torch.float8_e4m3fn:
            part.view(torch.uint8)[e] = 0x7F
        elif part.dtype.is_floating_point:
            part[e] = float("nan")


def _poison_q4_0(parts: Parts, e: Any) -> None:
    parts[0][e] = 0xFF  # d = 0xFFFF is a NaN


# --------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Format:
    name: str
    block: int  # C must be a multiple of it
    make: Callable[[Generator, int, int, int], Parts]
    ints: Callable[[Tensor], Parts]  # encodes weights of -1, 0 and 1 without error
    poison: Callable[[Parts, Any], None]  # makes the indexed experts NaN
    # A variant is the same format for the operator under another test id (other legal dtypes of a part).
    variant: str = ""

    def __str__(self) -> str:
        return self.name + (f"-{self.variant}" if self.variant else "")

    def decode(self, parts: Parts) -> Tensor:
        return reference.decode(self.name, parts)

    def columns(self, n: int) -> int:
        """n rounded up to something this format can hold."""
        return -(-n // self.block) * self.block


_FP8 = Format("fp8_block", 1, _fp8, _fp8_ints, _poison_floats)
FORMATS: dict[str, Format] = {
    str(f): f
    for f in (
        Format("bf16", 1, _dense(torch.bfloat16), lambda w: [w.to(torch.bfloat16)], _poison_floats),
        Format("f16", 1, _dense(torch.float16), lambda w: [w.to(torch.float16)], _poison_floats),
        Format("f32", 1, _dense(torch.float32), lambda w: [w.to(torch.float32)], _poison_floats),
        Format("mxfp4", 32, _mx, _mx_ints, _poison_mx),
        Format("nvfp4", 16, _nv, _nv_ints, _poison_floats),
        Format("ds_fp4", 32, _mx, _mx_ints, _poison_mx),
        _FP8,
        replace(_FP8, make=_fp8_bf16, variant="bf16"),
        Format("q4_0", 32, _q4_0, _q4_0_ints, _poison_q4_0),
    )
}
NAMES = [n for n in FORMATS if not FORMATS[n].variant]
FP4 = [n for n in NAMES if n.endswith("fp4")]
ANY_COLUMNS = [n for n in FORMATS if FORMATS[n].block == 1]

# ----------------------------------------------------------------------------------------------------- odd placements


def raw(t: Tensor) -> Tensor:
    """A contiguous tensor's bytes, flat (a view)."""
    return t.reshape(-1).view(torch.uint8)


def place(t: Tensor, offset: int) -> Tensor:
    """A copy of t whose data starts `offset` bytes after an aligned address (odd ones too: a mapped file's tensors)."""
    store = bytearray(t.numel() * t.element_size() + offset + 128)
    base = torch.frombuffer(store, dtype=torch.uint8)
    start = offset + (-base.data_ptr() % 64)
    view = torch.frombuffer(store, dtype=t.dtype, count=t.numel(), offset=start).reshape(t.shape)
    view.copy_(t) if start % t.element_size() == 0 else raw_copy(view, t)
    assert (view.data_ptr() - offset) % 64 == 0
    return view


def raw_copy(dst: Tensor, src: Tensor) -> None:
    """Copies bytes by memmove: torch's own kernels may assume aligned elements."""
    import ctypes

    src = src.contiguous()
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size())


def spread(t: Tensor, gap: int, fill: int = 0xFF) -> Tensor:
    """A copy of t [E, ...] with `gap` elements of `fill` bytes (NaN in every float type) after each expert."""
    each = t[0].numel()
    store = torch.full((t.shape[0] * (each + gap) * t.element_size(),), fill, dtype=torch.uint8).view(t.dtype)
    view = store.as_strided(t.shape, (each + gap, *t[0].contiguous().stride()))
    view.view(torch.uint8).copy_(t.contiguous().view(torch.uint8)) if t.element_size() == 1 else view.copy_(t)
    return view


# -------------------------------------------------------------------------------------------------------------- banks


@dataclass
class Bank:
    """Both projections of one layer and the reference weights they stand for."""

    fmt: Format
    gate_up: Parts
    down: Parts
    down_fmt: Format | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of every call: biases, activation, ...

    @cached_property
    def w1(self) -> Tensor:
        return self.fmt.decode(self.gate_up)

    @cached_property
    def w2(self) -> Tensor:
        return (self.down_fmt or self.fmt).decode(self.down)

    @property
    def formats(self) -> dict[str, str | None]:
        down = self.down_fmt.name if self.down_fmt and self.down_fmt.name != self.fmt.name else None
        return {"format": self.fmt.name, "down_format": down}

    def with_(self, **kwargs: Any) -> Bank:
        bank = replace(self, kwargs={**self.kwargs, **kwargs})
        bank.__dict__.update({k: self.__dict__[k] for k in ("w1", "w2") if k in self.__dict__})
        return bank

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor, **kwargs: Any) -> Tensor:
        return ops.experts(hidden, ids, weights, self.gate_up, self.down, **self.formats, **{**self.kwargs, **kwargs})

    def reference(self, hidden: Tensor, ids: Tensor, weights: Tensor, **kwargs: Any) -> reference.Reference:
        arguments: Any = {**self.formats, **self.kwargs, **kwargs}
        return reference.experts(hidden, ids, weights, self.w1, self.w2, **arguments)

    def check(self, hidden: Tensor, ids: Tensor, weights: Tensor, what: str = "", **kwargs: Any) -> Tensor:
        """Calls the operator, compares with the reference, returns the result."""
        out = self(hidden, ids, weights, **kwargs)
        assert out.dtype == hidden.dtype and out.is_contiguous()
        reference.assert_close(out, self.reference(hidden, ids, weights, **kwargs), what or str(self.fmt))
        return out

    def poison(self, keep: Iterable[int]) -> None:
        """Makes every expert NaN that is not in `keep`; the reference weights of the kept ones stay."""
        kept = set(keep)
        dead = [e for e in range(self.gate_up[0].shape[0]) if e not in kept]
        _ = self.w1, self.w2
        if dead:
            self.fmt.poison(self.gate_up, dead)
            (self.down_fmt or self.fmt).poison(self.down, dead)


def make_bank(
    fmt: str,
    e: int,
    h: int,
    i: int,
    seed: int = 0,
    down: str | None = None,
    bias: bool = False,
    **kwargs: Any,
) -> Bank:
    g = rng(seed)
    f, d = FORMATS[fmt], FORMATS[down or fmt]
    if bias:
        kwargs["gate_up_bias"] = torch.randn(e, 2 * i, generator=g)
        kwargs["down_bias"] = torch.randn(e, h, generator=g)
    return Bank(f, f.make(g, e, 2 * i, h), d.make(g, e, h, i), d if down else None, kwargs)


def make_inputs(
    m: int, h: int, k: int, e: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16, distinct: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [m, h], ids [m, k] int64 and softmax-like weights f32 [m, k]."""
    g = rng(seed)
    hidden = torch.randn(m, h, generator=g).to(dtype)
    if distinct and k <= e:
        ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(m)]) if m else torch.empty(0, k).long()
    else:
        ids = torch.randint(0, e, (m, k), generator=g)
    return hidden, ids, torch.rand(m, k, generator=g) + 0.05
