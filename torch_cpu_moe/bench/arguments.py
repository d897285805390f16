"""Options that the benchmarks share, checked before anything slow starts."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import compare
from .presets import DEFAULT, PRESETS, Geometry

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglu_clamp")


def positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, a whole number, got {text!r}")
    return int(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type for `parse`d values with commas between them, each once."""

    def parse_all(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))

    return parse_all


def one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}; got {text!r}")
        return text

    return parse


def setting(text: str) -> tuple[str, list[str]]:
    try:
        return compare.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def picture(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a .png file in a folder that exists, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'torch-cpu-moe[plot]'")
    return path


def add_geometry(parser: argparse.ArgumentParser, default: Geometry = DEFAULT) -> None:
    group = parser.add_argument_group("geometry")
    unless = "the preset's"
    group.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"{', '.join(PRESETS)} (default: {default.name}{f', {default.shape}' if default is DEFAULT else ''})",
    )
    group.add_argument("--hidden", type=positive, help=f"H (default: {unless})")
    group.add_argument("--intermediate", type=positive, help=f"I of an expert (default: {unless})")
    group.add_argument("--experts", type=positive, help=f"E of a layer (default: {unless})")
    group.add_argument("--top-k", type=positive, help=f"experts of a token (default: {unless})")
    group.add_argument("--activation", choices=ACTIVATIONS, help=f"default: {unless}")
    parser.set_defaults(default_geometry=default)


def add_common(parser: argparse.ArgumentParser, formats: str = "all", ab: bool = True) -> None:
    parser.add_argument("--formats", help=f"names of `formats()` with commas between (default: {formats})")
    parser.add_argument("--precision", default="exact", choices=compare.PRECISIONS, help="default: exact")
    parser.add_argument("--repeat", type=positive, help="cycles of measurements, n; the median is quoted (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the result; needs the extra [plot]")
    if ab:
        parser.add_argument(
            "--ab",
            type=setting,
            metavar="KEY=A,B",
            help=f"compare settings in alternating cycles (default then: {compare.PAIRED}); KEY is one of "
            f"{', '.join(compare.KEYS)}; {compare.RULE}",
        )


def geometry(args: argparse.Namespace) -> Geometry:
    """The preset with what was asked for instead.

    Raises:
        ValueError: values that do not go together.
    """
    preset = PRESETS[args.preset] if args.preset else args.default_geometry
    options = ("hidden", "intermediate", "experts", "top_k", "layers", "activation")
    changes = {name: getattr(args, name) for name in options if getattr(args, name, None) is not None}
    if "activation" in changes and changes["activation"] not in ("swigluoai", "swiglu_clamp"):
        changes["limit"] = None
    if changes and preset is not DEFAULT:
        changes["name"] = f"{preset.name} with {', '.join(f'{k}={v}' for k, v in changes.items() if v is not None)}"
    result = dataclasses.replace(preset, **changes)
    if result.top_k > result.experts:
        raise ValueError(f"--top-k must be at most --experts ({result.experts}), got {result.top_k}")
    return result


def cycles(args: argparse.Namespace) -> int:
    """How many cycles; ValueError: too few to compare anything."""
    compared = getattr(args, "ab", None) is not None or getattr(args, "contend", False)
    if args.repeat is None:
        return compare.PAIRED if compared else 5
    if compared and args.repeat < 2:
        raise ValueError(f"--repeat must be at least 2 to compare settings, got {args.repeat}")
    return int(args.repeat)


def formats(args: argparse.Namespace, geometry: Geometry, default: tuple[str, ...] = ()) -> list[str]:
    """The formats that were asked for, or `default`, or all; ValueError: unknown, or the geometry does not suit one."""
    from .._runtime import formats as known

    blocks = {f["name"]: f["block"] for f in known()}
    chosen = list(dict.fromkeys(args.formats.split(","))) if args.formats is not None else list(default or blocks)
    if unknown := sorted(set(chosen) - set(blocks)):
        raise ValueError(f"--formats: unknown {', '.join(unknown)}; expected some of {', '.join(blocks)}")
    for name in chosen:
        for option, size in (("hidden", geometry.hidden), ("intermediate", geometry.intermediate)):
            if size % blocks[name]:
                raise ValueError(f"--{option}: {name} needs a multiple of {blocks[name]}, got {size}")
    return chosen
