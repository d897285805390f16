"""`python -m torch_cpu_moe bench`: what it says and when, on sizes that take no time; the rates are not judged."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_cpu_moe
from torch_cpu_moe import _ceiling, _host
from torch_cpu_moe.__main__ import main
from torch_cpu_moe.bench import arguments, compare, decode, measure, memory, plot, prefill, report
from torch_cpu_moe.bench.batch import Case, cases
from torch_cpu_moe.bench.contend import BLOCK, Attention, Stream
from torch_cpu_moe.bench.presets import DEFAULT, PRESETS, Geometry

TINY = ("--hidden", "64", "--intermediate", "32", "--experts", "4", "--top-k", "2")
QUICK = (*TINY, "--formats", "mxfp4", "--repeat", "2")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memory to read from: the sizes are not what is tested."""
    monkeypatch.setattr(_ceiling, "region_bytes", lambda: 8 << 20)
    monkeypatch.setattr(decode, "STREAM_BYTES", 8 << 20)


@pytest.fixture
def nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a measurement would begin."""

    def start(*_: object) -> None:
        raise AssertionError("the benchmark started")

    monkeypatch.setattr(_ceiling.Ceiling, "__init__", start)
    monkeypatch.setattr(report.Report, "__init__", start)


def bench_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["bench", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert err.splitlines()[0] == document["statement"]
    return document


# ---------- the verdict


rates = st.floats(1e-3, 1e6)
pairs = st.integers(1, 9).flatmap(lambda n: st.tuples(*[st.lists(rates, min_size=n, max_size=n)] * 2))


@given(pairs)
def test_a_winner_is_ahead_and_the_order_of_naming_does_not_matter(both: tuple[list[float], list[float]]) -> None:
    a, b = both
    found = compare.verdict({"a": a, "b": b})
    assert found.winner == compare.verdict({"b": b, "a": a}).winner
    if found.winner is not None:
        winner, loser = (a, b) if found.winner == "a" else (b, a)
        assert len(a) >= compare.APART
        assert statistics.median(winner) > statistics.median(loser)
        assert all(x > y for x, y in zip(winner, loser, strict=True))
        assert f"{found.winner} is faster" in found.text
    else:
        assert "is faster" not in found.text
    median, least, most = found.ratios["b"]
    assert least <= median <= most
    assert found.ratios["a"] == (1.0, 1.0, 1.0)


@given(pairs)
def test_a_rule_of_order_alone(both: tuple[list[float], list[float]]) -> None:
    """The unit of the rates says nothing."""
    a, b = both
    scaled = compare.verdict({"a": [4 * x for x in a], "b": [4 * x for x in b]})
    assert scaled.winner == compare.verdict({"a": a, "b": b}).winner


def test_the_chance_of_a_false_winner_is_what_the_rule_says() -> None:
    ranks = range(2 * compare.APART)
    splits = [(list(c), [r for r in ranks if r not in c]) for c in combinations(ranks, compare.APART)]
    named = [compare.verdict({"a": [x + 1.0 for x in a], "b": [x + 1.0 for x in b]}).winner for a, b in splits]
    assert (len(splits) - named.count(None)) / len(splits) <= 1 / 32
    # Pairs drift together, so that the ranges overlap; each pair's order is a coin.
    coins = list(product([0.5, -0.5], repeat=compare.PAIRED))
    base = [10.0 * i + 10 for i in range(compare.PAIRED)]
    named = [
        compare.verdict({"a": base, "b": [x + c for x, c in zip(base, coin, strict=True)]}).winner for coin in coins
    ]
    assert (len(coins) - named.count(None)) / len(coins) == 1 / 32


def test_verdicts() -> None:
    clear, same = [2.0, 2.1, 2.2, 2.0], [1.0, 1.1, 1.2, 1.1]
    assert compare.verdict({"a": clear, "b": same}).winner == "a"
    assert compare.verdict({"a": clear, "b": same, "c": same}).winner == "a"
    assert compare.verdict({"a": clear, "b": same, "c": clear}).winner is None  # it must beat all of them
    short = compare.verdict({"a": clear[:3], "b": same[:3]})
    assert short.winner is None
    assert "it takes 4" in short.text
    assert compare.verdict({"a": [math.nan, *clear[1:]], "b": same}).winner is None
    assert "no difference seen; b / a: 1.00x" in compare.verdict({"a": same, "b": same}).text
    of_three = compare.verdict({"a": same, "b": same, "c": [value / 2 for value in same]})
    assert of_three.winner is None and of_three.text.startswith("none is ahead of all others; slower: c; ")


def test_cycles_alternate_forwards_and_backwards() -> None:
    order: list[str] = []

    def measured(case: str) -> int:
        order.append(case)
        return len(order)

    samples = compare.alternate(3, ["a", "b"], measured)
    assert "".join(order) == "abbaab"
    assert samples == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_settings_are_undone(threads: Callable[[int], None]) -> None:
    before = (torch_cpu_moe.get_num_threads(), torch_cpu_moe.tiers()["active"])
    seen = []
    for text in ("threads=1,3", "isa=scalar," + before[1], "precision=exact,fast"):
        if text == "isa=scalar,scalar":
            continue
        for configuration in compare.configurations(compare.split(text), "exact"):
            with configuration.active():
                now = (torch_cpu_moe.get_num_threads(), torch_cpu_moe.tiers()["active"], configuration.precision)
                seen.append((configuration.label, now))
            assert (torch_cpu_moe.get_num_threads(), torch_cpu_moe.tiers()["active"]) == before
    found = dict(seen)
    assert found["threads=3"] == (3, before[1], "exact")
    assert found["precision=fast"] == (*before, "fast")
    if "isa=scalar" in found:
        assert found["isa=scalar"][1] == "scalar"


# ---------- presets


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_are_geometries_that_the_operator_takes(preset: Geometry) -> None:
    blocks = {f["name"]: f["block"] for f in torch_cpu_moe.formats()}
    for name in preset.formats:
        assert preset.hidden % blocks[name] == preset.intermediate % blocks[name] == 0
    # The activation, the limit, the biases and the order of rows, on fewer and smaller experts.
    tiny = dataclasses.replace(preset, hidden=128, intermediate=64, experts=preset.top_k)
    generator = torch.Generator().manual_seed(0)
    bank = measure.make_bank(preset.formats[0], tiny, generator)
    ids = measure.random_ids(1, tiny.experts, tiny.top_k, generator)
    x = torch.randn(1, 128, generator=generator)
    out = bank.run(x, ids, torch.full(ids.shape, 1.0), "exact")
    assert out.isfinite().all()
    assert (bank.bias_bytes > 0) == preset.bias
    assert bank.expert_bytes == measure.expert_bytes(preset.formats[0], tiny)


@pytest.mark.parametrize(
    ("name", "billions"),  # as the models' cards give them; experts are most of them, but not all
    [
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("DeepSeek-V3", 671),
        ("GLM-4.5", 355),
        ("GLM-4.5-Air", 106),
        ("GLM-4.6", 355),
        ("MiniMax-M2", 230),
        ("Kimi-K2", 1040),
    ],
)
def test_presets_have_their_models_size(name: str, billions: float) -> None:
    p = PRESETS[name]
    experts = 3 * p.hidden * p.intermediate * p.experts * p.layers / 1e9
    assert 0.9 * billions < experts < billions


# ---------- memory


GIB = 1 << 30


@given(st.integers(1, 10**7), st.integers(0, 10**7), st.integers(0, 10**11), st.sampled_from(list(PRESETS.values())))
def test_a_cut_fits_and_is_as_large_as_can_be(expert: int, layer: int, allowed: int, preset: Geometry) -> None:
    def size(layers: int, experts: int) -> int:
        return layers * (layer + experts * expert)

    least = min(2 * preset.top_k, preset.experts)
    if size(1, least) > allowed:
        with pytest.raises(ValueError, match="--gib: one layer"):
            memory.fit(preset, expert, layer, allowed)
        return
    cut = memory.fit(preset, expert, layer, allowed)
    assert size(cut.layers, cut.experts) <= allowed
    assert 1 <= cut.layers <= preset.layers
    assert least <= cut.experts <= preset.experts
    if cut.experts < preset.experts:
        assert cut.layers <= memory.MIN_LAYERS
        assert size(cut.layers, cut.experts + 1) > allowed
    elif cut.layers < preset.layers:
        assert size(cut.layers + 1, least if cut.layers < memory.MIN_LAYERS else cut.experts) > allowed


def test_cuts_of_a_model() -> None:
    qwen = PRESETS["Qwen3-30B-A3B"]
    expert = 3 * qwen.hidden * qwen.intermediate * 2
    layer = 128 * expert
    assert memory.fit(qwen, expert, 0, 48 * layer) == memory.Cut(48, 128)
    assert memory.fit(qwen, expert, 0, 48 * layer - 1) == memory.Cut(47, 128)
    assert memory.fit(qwen, expert, 0, 4 * layer - 1) == memory.Cut(4, 127)
    assert memory.fit(qwen, expert, 0, 16 * expert) == memory.Cut(1, 16)


@pytest.mark.parametrize(("available", "limit"), [(20, None), (30, 20), (20, 30)])
def test_the_budget_is_the_least_of_what_is_free_and_the_limit(available: int, limit: int | None) -> None:
    sizes = {"available_bytes": available * GIB, "limit_bytes": limit and limit * GIB}
    assert memory.budget(None, sizes) == 20 * GIB - memory.RESERVE
    assert memory.budget(1.5, sizes) == 3 * GIB // 2
    with pytest.raises(ValueError, match=r"--gib: 18 GiB .* 20.0 GiB are available, .* expected at most 17.0"):
        memory.budget(18, sizes)
    memory.check_fits(17 * GIB, "--experts", sizes)
    with pytest.raises(ValueError, match=r"--experts: a bank of 18.0 GiB does not fit"):
        memory.check_fits(18 * GIB, "--experts", sizes)
    assert memory.budget(5, {"available_bytes": None, "limit_bytes": None}) == 5 * GIB


def test_peak_memory_of_a_call() -> None:
    peak = memory.PeakRss()
    rise = peak.of(lambda: torch.ones(64 << 20, dtype=torch.uint8).max())
    assert rise is not None, "this kernel does not tell"
    assert 60 << 20 < rise < 100 << 20
    kept: list[torch.Tensor] = []
    peak.of(lambda: kept.append(torch.ones(64 << 20, dtype=torch.uint8)))
    later = peak.of(lambda: None)
    assert later is not None
    assert later > 60 << 20, "what a call keeps counts for those after it"


# ---------- what is printed


def test_bw_json(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    document = bench_json(capsys, "bw", *TINY, "--formats", "bf16,q4_0", "--gib", "0.001", "--ab", "threads=1,2")
    assert document["benchmark"] == "bw"
    assert document["scope"] == "isolated"
    assert document["statement"].startswith("isolated: one operator at a time, not a served model; M=1 H=64 I=32 E=4")
    assert "threads 1 against 2" in document["statement"]
    setting = document["setting"]
    assert setting["cpu"] == _host.cpu_model()
    assert setting["tier"] == torch_cpu_moe.tiers()["active"]
    assert setting["threads"] == torch_cpu_moe.get_num_threads()
    assert setting["torch"] == torch.__version__
    assert abs(time.time() - datetime.datetime.fromisoformat(setting["date"]).timestamp()) < 60
    assert setting["options"]["ab"] == ["threads", ["1", "2"]]
    assert setting["geometry"]["hidden"] == 64
    rows = document["rows"]
    found = [(row["format"], row["configuration"], row["n"], row["scope"]) for row in rows]
    assert found == [(f, c, 6, "isolated") for f in ("bf16", "q4_0") for c in ("threads=1", "threads=2")]
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["ceiling_gb_per_s"] > 0
        assert row["bank_gib"] >= 0.001
        expert = 3 * 64 * 32 * (2 if row["format"] == "bf16" else 18 / 32)
        assert row["flop_per_byte"] == pytest.approx(6 * 64 * 32 / expert)
    assert [v["about"] for v in document["verdicts"]] == ["bf16", "q4_0"]
    assert all(v["n"] == 6 and set(v["ratios"]) == {"threads=1", "threads=2"} for v in document["verdicts"])
    assert compare.RULE in document["notes"]


def test_batch_json(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    document = bench_json(capsys, "batch", *QUICK, "--gib", "0.001", "--tokens", "3,2")
    assert document["scope"] == "isolated"
    rows = document["rows"]
    found = [(row["tokens"], row["experts_chosen"]) for row in rows]
    assert found == [(1, "same"), (2, "same"), (3, "same"), (2, "random"), (3, "random")]
    assert rows[0]["time_over_one"] == rows[0]["bytes_over_one"] == 1
    assert [row["bytes_over_one"] for row in rows[:3]] == [1, 1, 1]
    assert all(1 <= row["bytes_over_one"] <= 2 for row in rows[3:])  # of 4 experts 2 are the least
    assert rows[2]["flop_per_byte"] == pytest.approx(3 * rows[0]["flop_per_byte"])


def test_batch_has_one_case_of_one_token() -> None:
    assert cases([1, 2]) == cases([2]) == [Case(1, "same"), Case(2, "same"), Case(2, "random")]


def test_decode_json(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*QUICK, "--steps", "2", "--layers", "50", "--gib", "0.0002", "--tokens", "3", "--context", "16")
    document = bench_json(capsys, "decode", *options, "--contend", "--contend-gbs", "1", "--ab", "precision=exact,fast")
    assert document["scope"] == "in a model-like stack"
    statement = document["statement"]
    rows = document["rows"]
    cut = rows[0]["layers"]
    assert 1 <= cut < 50
    assert statement.startswith("in a model-like stack: Qwen3-30B-A3B with hidden=64, intermediate=32")
    assert f"{cut} of 50 MoE layers with 4 of 4 experts, M=3, NOT COLD" in statement
    assert "attention over 16 tokens" in statement
    assert [(row["configuration"], row["contended"]) for row in rows] == [
        (f"precision={p}", contended) for p in ("exact", "fast") for contended in (False, True)
    ]
    for row in rows:
        assert row["scope"] == "in a model-like stack"
        assert row["tokens_per_s_extrapolated"] == pytest.approx(row["tokens_per_s"] * cut / 50)
        assert row["layer_samples"] == 2 * 2 * cut
        assert 0 < row["layer_ms_p50"] <= row["layer_ms_p99"]
        assert 0 < row["experts_part"] < 1
        assert row["layers"] * row["layer_ms_p50"] < 1e3 * 3 / row["tokens_per_s"] * 3
        assert ("stream_gb_per_s" in row) == ("attention_ms" in row) == row["contended"]
        if row["contended"]:
            assert row["attention_ms"] > 0
            assert row["stream_gb_per_s"] > 0
    about = [verdict["about"] for verdict in document["verdicts"]]
    assert about[:2] == ["mxfp4 alone, tokens/s", "mxfp4 contended, tokens/s"]
    assert about[2:] == ["mxfp4 GB/s of the experts"] * 2
    assert not [thread for thread in threading.enumerate() if thread.name == "bench-stream"]


def test_prefill_json(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    document = bench_json(capsys, "prefill", *QUICK, "--tokens", "8,16", "--ab", "threads=1,2")
    assert torch.get_num_threads() == before
    assert document["scope"] == "isolated"
    rows = document["rows"]
    cases = [(row["tokens"], row["routing"], row["configuration"]) for row in rows]
    assert cases == list(product([8, 16], ["uniform", "skewed"], ["threads=1", "threads=2"]))
    for row in rows:
        assert row["tokens_per_s_of_one_layer"] == pytest.approx(row["gflop_per_s"] * 1e9 / (6 * 64 * 32 * 2))
        assert min(row["torch_gflop_per_s"], row["torch_large_gflop_per_s"], row["over_torch"]) > 0
        assert row["peak_rss_above_bank"] < 64 << 20
    assert len(document["verdicts"]) == 4


@pytest.mark.parametrize(
    ("options", "start", "line"),
    [
        (("bw", *QUICK, "--gib", "0.001"), "isolated: ", "% of read ceiling ("),
        (("batch", *QUICK, "--gib", "0.001", "--tokens", "2"), "isolated: ", "x time(1) for"),
        (("decode", *QUICK, "--gib", "0.0002", "--steps", "1"), "in a model-like stack: ", "extrapolated)"),
        (("prefill", *QUICK, "--tokens", "4"), "isolated: ", "of torch's matmuls per expert"),
    ],
)
def test_the_first_line_says_what_kind_of_number_follows(
    small: None, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], start: str, line: str
) -> None:
    assert main(["bench", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(start)
    results = [text for text in lines if text.startswith("mxfp4 ")]
    assert results
    assert all(line in text and "n=2  spread " in text for text in results)


def test_a_share_above_the_ceiling_is_not_believed() -> None:
    row = {"gb_per_s": 15.9, "share": 0.93, "ceiling_gb_per_s": 17.1}
    assert report.share_text(row) == "  15.9 GB/s   93% of read ceiling (17.1)"
    assert "disturbed" in report.share_text(row | {"share": 1.1})


def test_load_by_others_is_seen(tmp_path: Path) -> None:
    assert report.others_cpus((10.0, 1.0, 100.0), (20.0, 6.0, 110.0)) == 0.5
    assert report.others_cpus((10.0, 1.0, 100.0), (20.0, 12.0, 110.0)) == 0
    assert report.others_cpus((10.0, 1.0, None), (20.0, 6.0, None)) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9999 888 4 5 600 7 8\ncpu0 1 2 3 4\n")
    tick = os.sysconf("SC_CLK_TCK")
    assert _host.busy_seconds(tmp_path) == (100 + 20 + 30 + 4 + 5 + 600) / tick
    assert _host.busy_seconds(tmp_path / "none") is None


# ---------- plots


@pytest.mark.parametrize("what", ["bw", "decode", "prefill"])
def test_plot(small: None, tmp_path: Path, what: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    sizes = {"bw": ("--gib", "0.001"), "decode": ("--gib", "0.001", "--steps", "1"), "prefill": ("--tokens", "4")}
    assert main(["bench", what, *QUICK, *sizes[what], "--plot", str(path)]) == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 5000


def test_labels_tell_the_rows_apart() -> None:
    base = {"format": "bf16", "configuration": ""}
    assert plot.label_of(base | {"tokens": 1}) == "bf16"
    assert plot.label_of(base | {"tokens": 8, "experts_chosen": "same"}) == "bf16 M=8 same"
    assert plot.label_of(base | {"tokens": 8, "routing": "skewed"}) == "bf16 M=8 skewed"
    assert plot.label_of(base | {"configuration": "isa=avx2", "contended": True}) == "bf16 isa=avx2 contended"


def test_plot_without_matplotlib(
    nothing_slow: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "bw", "--plot", str(tmp_path / "x.png")])
    assert "argument --plot: matplotlib is not installed: pip install 'torch-cpu-moe[plot]'" in capsys.readouterr().err


# ---------- wrong arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "WHAT"),
        ("nonsense", "invalid choice: 'nonsense'"),
        ("bw --repeat 0", "--repeat: must be at least 1, a whole number, got '0'"),
        ("bw --gib nan", "--gib: must be a number above 0, got 'nan'"),
        ("bw --gib 1e9", "--gib: 1e+09 GiB of banks do not fit"),
        ("bw --experts 100000000", "--experts: a bank of"),
        ("bw --formats mxfp5", "--formats: unknown mxfp5; expected some of bf16, f16, f32, mxfp4"),
        ("bw --formats q4_0 --hidden 100", "--hidden: q4_0 needs a multiple of 32, got 100"),
        ("bw --top-k 65", "--top-k must be at most --experts (64), got 65"),
        ("bw --preset GPT-9", "--preset: invalid choice: 'GPT-9'"),
        ("bw --plot x.jpg", "--plot: expected the name of a .png file in a folder that exists, got 'x.jpg'"),
        ("bw --ab numa=0,1", "--ab: unknown setting 'numa'; expected one of threads, isa, precision"),
        ("bw --ab openmp=auto,keep", "--ab: openmp cannot change within a process"),
        ("bw --ab threads=2", "--ab: expected threads= and two or more different values"),
        ("bw --ab threads=2,2", "--ab: expected threads= and two or more different values"),
        ("bw --ab threads=1,0", "--ab: expected numbers of threads from 1 to 4096, got '0'"),
        ("bw --ab precision=exact,sloppy", "--ab: expected precisions out of exact, fast, got 'sloppy'"),
        ("bw --ab isa=scalar,mmx", "--ab: this CPU runs "),
        ("bw --ab threads=1,2 --repeat 1", "--repeat must be at least 2 to compare settings, got 1"),
        ("batch --ab threads=1,2", "unrecognized arguments: --ab"),
        ("batch --tokens 1,x", "--tokens: must be at least 1, a whole number, got 'x'"),
        ("decode --gib 0.0001", "--gib: one layer of 16 experts, with its router and cache, takes"),
        ("decode --contend-gbs 3", "--contend-gbs needs --contend"),
        ("decode --context 0", "--context: must be at least 1"),
        ("prefill --routing even", "--routing: expected some of uniform, skewed; got 'even'"),
        ("prefill --experts 8", "--routing: skewed needs more --experts than --top-k (8), got 8"),
    ],
)
def test_wrong_arguments_are_seen_before_anything_slow(
    nothing_slow: None, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    try:
        status = main(["bench", *options.split()])
    except SystemExit as end:  # the parser's own
        status = end.code  # type: ignore[assignment]
    assert status == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_presets_can_be_changed() -> None:
    options = argparse.Namespace(preset="GLM-4.5", default_geometry=DEFAULT, hidden=None, top_k=4, activation="relu2")
    changed = arguments.geometry(options)
    glm = PRESETS["GLM-4.5"]
    assert (changed.hidden, changed.top_k, changed.activation) == (glm.hidden, 4, "relu2")
    assert changed.name == "GLM-4.5 with top_k=4, activation=relu2"


def test_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    root = str(Path(torch_cpu_moe.__file__).resolve().parent.parent)
    program = f"""
import sys
from torch_cpu_moe import _ceiling
from torch_cpu_moe.__main__ import main
_ceiling.region_bytes = lambda: 8 << 20
sys.exit(main("bench decode {" ".join(QUICK)} --gib 0.001 --steps 100000000 --contend --context 16".split()))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("in a model-like stack")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err


# ---------- parts


def test_the_fastest_read_is_the_ceiling(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    """Loop 2 in large reads for one thread, loop 1 in small ones for two."""
    ceiling = _ceiling.Ceiling(64 << 20)
    calls: list[tuple[int, int]] = []

    def rate(size: int, loop: int) -> float:
        calls.append((size, loop))
        if torch_cpu_moe.get_num_threads() == 1:
            return 10 + 5 * (loop == 2) + size / 1e9
        return 10 + 5 * (loop == 1) - size / 1e9

    monkeypatch.setattr(ceiling, "_rate", rate)
    for count, loop, size in ((1, 2, 64 << 20), (2, 1, 4 << 20), (1, 2, 64 << 20)):
        threads(count)
        assert ceiling.read(1000) >= 15 - 0.1
        assert calls[-1] == (size, loop)
    assert {loop for _, loop in calls} == set(range(torch.ops.cpu_moe.stream_read_variants()))


def test_a_slow_tier_has_no_slow_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = _ceiling.Ceiling(8 << 20)
    seen = set()

    def rate(size: int, loop: int) -> float:
        seen.add(torch_cpu_moe.tiers()["active"])
        return 1.0

    monkeypatch.setattr(ceiling, "_rate", rate)
    torch_cpu_moe.set_tier("scalar")
    try:
        ceiling.read(1000)
        assert torch_cpu_moe.tiers()["active"] == "scalar"
    finally:
        torch_cpu_moe.set_tier("auto")
    assert seen == {torch_cpu_moe.tiers()["supported"][0]}


def test_the_stream_keeps_to_its_rate() -> None:
    stream = Stream(16 << 20, 0.5)
    for _ in range(2):  # it can be started again
        with stream:
            time.sleep(0.3)
        assert BLOCK / 0.4 / 1e9 < stream.gb_per_s < 0.56
    with (free := Stream(16 << 20)):
        time.sleep(0.1)
    assert free.gb_per_s > stream.gb_per_s


def test_attention_reads_the_cache_that_it_counts() -> None:
    attention = Attention(2, 32, torch.Generator().manual_seed(0))
    assert attention.run().shape[2] == 2 * 4
    assert sum(t.nbytes for t in (attention._keys, attention._values)) == Attention.bytes(32)


@pytest.mark.parametrize("routing", prefill.ROUTINGS)
def test_routing(routing: str) -> None:
    shape = dataclasses.replace(DEFAULT, experts=16, top_k=4)
    ids = prefill.route(routing, 128, shape, torch.Generator().manual_seed(0))
    assert ids.shape == (128, 4)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 16 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=16)
    assert counts[1:].max() < 64
    assert counts[0] == 64 if routing == "skewed" else counts[0] < 64


def test_percentiles_were_measured() -> None:
    values = [float(x) for x in range(1, 201)]
    assert measure.percentile(values, 50) == 100
    assert measure.percentile(values, 99) == 198
    assert measure.percentile([7.0], 99) == 7
    assert measure.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
