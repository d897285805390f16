"""A picture of a benchmark: each row's share of the read ceiling or of torch's speed, and all under the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import ABOVE


def label_of(row: dict[str, Any]) -> str:
    """What tells a row from the others."""
    parts = [row["format"], row["configuration"]]
    if "contended" in row:
        parts.append("contended" if row["contended"] else "alone")
    elif row.get("tokens", 1) > 1:
        parts += [f"M={row['tokens']}", row.get("experts_chosen", ""), row.get("routing", "")]
    return " ".join(filter(None, parts))


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = document["rows"]
    on_roof = [row for row in rows if "flop_per_byte" in row]
    figure = Figure(figsize=(7 if not on_roof else 13, 1.8 + 0.32 * max(len(rows), 10)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(document["statement"], fontsize=8, wrap=True)
    panels = figure.subplots(1, 2 if on_roof else 1, squeeze=False)[0]

    shares = panels[0]
    places = range(len(rows))
    key, of = ("over_torch", "torch's matmuls per expert") if "over_torch" in rows[0] else ("share", "the read ceiling")
    # Grey: something disturbed the reads, and the share says nothing.
    colors = ["lightgrey" if key == "share" and row["share"] > ABOVE else "lightskyblue" for row in rows]
    shares.barh(places, [100 * row[key] for row in rows], color=colors)
    shares.axvline(100, color="black", linewidth=1)
    shares.set_yticks(places, [label_of(row) for row in rows], fontsize=8)
    for place, row in zip(places, rows, strict=True):
        text = f"{row['gb_per_s']:.1f} of {row['ceiling_gb_per_s']:.1f} GB/s"
        if "over_torch" in row:
            text = f"{row['gflop_per_s']:.0f} of {row['torch_gflop_per_s']:.0f} GFLOP/s"
        shares.text(0, place, " " + text, va="center", fontsize=7)
    shares.invert_yaxis()
    shares.set_xlabel(f"% of {of} ({document['scope']})")

    if on_roof:
        roof = panels[1]
        read = max(row["ceiling_gb_per_s"] for row in rows)
        peak = max((row["torch_large_gflop_per_s"] for row in rows if "torch_large_gflop_per_s" in row), default=None)
        xs = [row["flop_per_byte"] for row in on_roof]
        corner = [peak / read] if peak else []
        line = sorted([min(xs + corner) / 2, *corner, max(xs + corner) * 2])
        top = [min(read * x, peak) if peak else read * x for x in line]
        roof.plot(
            line, top, color="black", label=f"{read:.1f} GB/s" + (f", torch's {peak:.0f} GFLOP/s" if peak else "")
        )
        for name in dict.fromkeys(row["format"] for row in on_roof):
            mine = [row for row in on_roof if row["format"] == name]
            roof.plot([r["flop_per_byte"] for r in mine], [r["gflop_per_s"] for r in mine], "o", ms=4, label=name)
        roof.set_xscale("log")
        roof.set_yscale("log")
        roof.set_xlabel("floating-point operations per byte of weights")
        roof.set_ylabel("GFLOP/s")
        roof.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=120)
