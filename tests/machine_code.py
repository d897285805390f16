"""Looks for instructions above a tier, or above the baseline, in x86-64 object code.

There is no list of instructions here: what objdump finds is given to the assembler again, with leave to use the tier's
extensions and nothing else, and what it refuses is a finding. The text of an instruction does not tell its encoding
(`vaddps` on the low sixteen registers may need AVX or AVX-512), so that is read from the bytes and asked for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

# What `as` calls every x86-64 CPU. ENDBR64, which compilers may be configured to emit, is a no-operation there. By
# XGETBV libgcc learns which registers the operating system saves, when CPUID has said that it may ask.
BASELINE = "generic64+ibt+xsave"
# Each tier (the name of its namespace): the tier it is built on, and what it may use more, in the words of `as`. This
# says again what csrc/simd/tier.cpp asks the CPU for; the target regions of csrc/formats must keep to it.
TIERS = {
    "scalar": ("", ""),
    "avx2": ("scalar", "+avx2+fma+f16c"),
    "avx_vnni": ("avx2", "+avx_vnni"),
    "avx512": ("avx2", "+avx512f+avx512bw+avx512dq+avx512vl"),
    "avx512_vnni": ("avx512", "+avx512_vnni"),
    "avx512_vbmi": ("avx512_vnni", "+avx512vbmi"),
}


def missing_tools() -> list[str]:
    return [tool for tool in ("objdump", "as", "nm") if not shutil.which(tool)]


def architecture(tier: str | None) -> str:
    """The assembler's -march for a tier, or for what belongs to none."""
    if not tier:
        return BASELINE
    assert tier in TIERS, f"which instructions may {tier} use? Add a line to TIERS in tests/machine_code.py"
    base, extensions = TIERS[tier]
    return architecture(base) + extensions


def namespace(symbol: str) -> str | None:
    """The tier in whose namespace a function (mangled) lies: `x` of cpu_moe::x."""
    match = re.match(r"_ZZ?N[KVr]*7cpu_moe(\d+)(\w+)", symbol)
    return match[2][: int(match[1])] if match and match[2][: int(match[1])] in TIERS else None


def instructions(binary: Path) -> dict[str, set[str]]:
    """The distinct instructions of each function (mangled), as the assembler takes them."""
    command = ["objdump", "-d", "--insn-width=16", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in text.splitlines():
        if line.endswith(">:"):
            current = functions.setdefault(line.split("<", 1)[1][:-2], set())
        elif line.count("\t") >= 2:
            _, code, instruction = line.split("\t", 2)
            current.add(_for_assembler(code.split(), instruction))
    current.discard("")
    for found in functions.values():
        found.discard("")
    return functions


def _for_assembler(code: list[str], instruction: str) -> str:
    """An instruction of objdump's as `as` takes it; "" for padding."""
    if "nop" in instruction or "xchg   %ax,%ax" in instruction:
        return ""  # in forms that nobody writes
    instruction = re.sub(r"\s*(#.*|<.*>)$", "", instruction).strip()
    # Prefixes that the linker's rewriting of thread-local addresses leaves behind.
    instruction = re.sub(r"^((data16|rex\.W|cs|ds) )+", "", instruction)
    # A jump's destination is a bare number, read as hexadecimal only with its 0x.
    instruction = re.sub(r"\s([0-9a-f]+)$", r" 0x\1", instruction)
    encoding = {"62": "{evex} ", "c4": "{vex} ", "c5": "{vex} "}.get(code[0], "")
    return encoding + instruction if not instruction.startswith("{") else instruction


def refused(texts: Iterable[str], march: str) -> dict[str, str]:
    """The instructions that `as -march` does not take, and why."""
    lines = sorted(texts)
    if not lines:
        return {}
    command = ["as", f"-march={march}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    errors = re.findall(r"^\{standard input\}:(\d+): Error: (.*)$", done.stderr, re.MULTILINE)
    assert (done.returncode == 0) == (not errors), done.stderr
    return {lines[int(number) - 1]: why for number, why in errors}


def above(binary: Path, tier: str | None) -> list[str]:
    """What an object file holds above its tier, a line a function."""
    return _report(instructions(binary), lambda _: tier)


def above_by_namespace(binary: Path) -> list[str]:
    """The same of a linked library, whose functions may use what the tier of their namespace may."""
    return _report(instructions(binary), namespace)


def _report(functions: dict[str, set[str]], tier_of: Callable[[str], str | None]) -> list[str]:
    findings = []
    for tier in {tier_of(symbol) for symbol in functions}:
        mine = {symbol: found for symbol, found in functions.items() if tier_of(symbol) == tier}
        wrong = refused(set().union(*mine.values()), architecture(tier))
        for symbol, found in mine.items():
            texts = sorted(found & wrong.keys())
            if texts:
                shown = "; ".join(f"{text} ({wrong[text]})" for text in texts[:3])
                findings.append(f"{symbol}: {shown}" + ("; ..." if len(texts) > 3 else ""))
    return findings


def shared_functions(binary: Path, tier: str) -> list[str]:
    """Functions of a tier's object file that other files may share: of equal ones the linker keeps any, for the whole
    library, and this one may carry the tier's instructions. Only those of the tier's own namespace are its own."""
    command = ["nm", "--defined-only", str(binary)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    visible = [line.split()[2] for line in lines if line.split()[1] in "TWi"]
    return [symbol for symbol in visible if namespace(symbol) != tier]
