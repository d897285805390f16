"""Sizes beyond 32 bits and large batches (NUM-15, IDS-08)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats import FORMATS, make_bank, make_inputs, ops, rng
from reference import assert_bits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_offsets_beyond_32_bits(name: str, tmp_path: Path, tier: str) -> None:
    """NUM-15: experts whose byte offset passes 2^31 and 2^32 give the bits of a bank that holds only them.

    The file is sparse: 8 MiB (bf16: 16 MiB) per expert, of which six are written; memory use stays small.
    """
    f = FORMATS[name]
    h, i, count = (4096, 2048, 600) if name == "mxfp4" else (2048, 2048, 300)
    each = f.make(rng(0), 1, 2 * i, h)
    half = count // 2 - 44  # 256 (mxfp4: 2^31 bytes), 106
    chosen = sorted({0, half - 1, half, 2 * half - 1, 2 * half, count - 1})
    parts = []
    for n, part in enumerate(each):
        path = str(tmp_path / f"part{n}")
        size = part[0].numel() * count
        flat = torch.from_file(path, shared=True, size=size, dtype=part.dtype)
        parts.append(flat.reshape(count, *part.shape[1:]))
    assert parts[0].numel() * parts[0].element_size() > 2**32
    down = f.make(rng(1), 1, h, i)
    down_parts = [p.expand(count, *p.shape[1:]) for p in down]
    hidden = torch.randn(1, h, generator=rng(2)).bfloat16()
    one = torch.ones(1, 1)
    want = {}
    for e in chosen:
        own = f.make(rng(10 + e), 1, 2 * i, h)
        for part, mine in zip(parts, own, strict=True):
            part[e].copy_(mine[0])
        want[e] = ops.experts(hidden, torch.zeros(1, 1).long(), one, own, down, name)
        got = ops.experts(hidden, torch.tensor([[e]]), one, parts, down_parts, name)
        assert_bits(got, want[e], f"expert {e}")
    together = ops.experts(
        hidden.expand(len(chosen), h),
        torch.tensor(chosen)[:, None],
        one.expand(len(chosen), 1),
        parts,
        down_parts,
        name,
    )
    assert_bits(together, torch.cat(list(want.values())))


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_every_batch_size_gives_the_same_rows(name: str) -> None:
    """IDS-08: 384 experts, top 8, M up to 32768: each row has the bits that it has alone."""
    e, k, h, i = 384, 8, 64, 64
    bank = make_bank(name, e, h, i)
    hidden, _, weights = make_inputs(32768, h, k, 1, distinct=False)
    ids = torch.randint(0, e, (32768, k), generator=rng(3))
    full = bank(hidden, ids, weights)
    for m in (1, 2, 255, 256, 257, 4096):
        assert_bits(bank(hidden[:m], ids[:m], weights[:m]), full[:m], f"M={m}")
    tail = slice(32768 - 9, 32768)
    bank.check(hidden[tail], ids[tail], weights[tail])
    assert_bits(bank(hidden[tail], ids[tail], weights[tail]), full[tail])


def test_scratch_grows_with_routes_not_with_experts(python: Callable[..., str]) -> None:
    """IDS-08: peak memory of M = 32768 is a small multiple of M k (H + 2I) floats; M E of them would be 12 GiB."""
    code = """
import resource, torch, formats
bank = formats.make_bank("mxfp4", 384, 64, 64)
hidden, _, weights = formats.make_inputs(32768, 64, 8, 1, distinct=False)
ids = torch.randint(0, 384, (32768, 8))
bank(hidden[:1], ids[:1], weights[:1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bank(hidden, ids, weights)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(python(code).split()[-1]) * 1024
    assert grown < 4 * 32768 * 8 * (64 + 3 * 64) * 4


def test_failed_allocation_is_an_exception(python: Callable[..., str]) -> None:
    """IDS-08: with the address space capped, a large call raises, and the pool serves the next small one."""
    code = """
import resource, torch, formats
bank = formats.make_bank("mxfp4", 8, 1024, 1024)
small = formats.make_inputs(2, 1024, 2, 8)
want = bank(*small)
hidden = torch.zeros(1, 1024).expand(60000, 1024)
ids, weights = torch.zeros(60000, 8).long(), torch.ones(60000, 8)
out = torch.empty(60000, 1024)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    try:
        torch.ops.cpu_moe.experts_out(hidden, ids, weights, bank.gate_up, bank.down, "mxfp4", out=out)
    except (MemoryError, RuntimeError) as error:
        print("refused", type(error).__name__, str(error)[:200])
    else:
        print("done")
    assert torch.equal(bank(*small), want)
print("alive")
"""
    out = python(code)
    # A kernel that works in pieces may need no large scratch at all: then it is simply done.
    assert "alive" in out and (out.count("refused") == 3 or out.count("done") == 3), out
