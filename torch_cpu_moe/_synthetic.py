"""Random banks of any format, quick to make: benchmarks need bytes in the right shape, not trained weights."""

from __future__ import annotations

import torch

from . import _runtime


def random_bank(
    name: str, experts: int, intermediate: int, hidden: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`gate_up` [E, 2I, H] and `down` [E, H, I] of format `name`: one quantized expert, repeated with rows rotated.

    Every expert has its own memory, and the values are of the size that trained weights have.
    """
    names = [f["name"] for f in _runtime.formats()]
    if name not in names:
        raise ValueError(f"format: unknown weight format {name!r}; expected one of {', '.join(names)}")

    def projection(rows: int, cols: int) -> list[torch.Tensor]:
        one = torch.ops.cpu_moe.quantize(torch.randn(1, rows, cols, generator=generator) * cols**-0.5, name)
        parts = []
        for part in one:
            bank = torch.empty((experts, *part.shape[1:]), dtype=part.dtype)
            raw = part.view(torch.uint8) if part.element_size() == 1 else part
            to = bank.view(torch.uint8) if part.element_size() == 1 else bank
            for e in range(experts):
                # By 128 rows an expert, so that scales of 128-row blocks rotate along. Two copies: roll() is slow.
                shift = (e * 128 if part.shape[1] == rows else e) % part.shape[1]
                to[e, shift:] = raw[0, : part.shape[1] - shift]
                to[e, :shift] = raw[0, part.shape[1] - shift :]
            parts.append(bank)
        return parts

    return projection(2 * intermediate, hidden), projection(hidden, intermediate)


def bytes_of(parts: list[torch.Tensor]) -> int:
    """Bytes of one expert of a projection."""
    return sum(part[0].nbytes for part in parts)
