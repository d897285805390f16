"""Instruction-set tiers (ISA-01): no object file holds an instruction that its tier's CPUs may lack."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import machine_code
import pytest
from kernel_build import KERNELS, TIERS, X86_TIERS, Objects, has_simde
from test_system import ROOT, compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="knows x86-64's instructions"),
    pytest.mark.skipif(bool(machine_code.missing_tools()), reason="needs binutils"),
]

NAMESPACES = {TIERS[tier]: tier.replace("-", "_") for tier in X86_TIERS}


@pytest.fixture(autouse=True)
def _baseline() -> None:
    """A compiler that is told to use more than the baseline everywhere does so."""
    command = [*compiler(), "-dM", "-E", "-x", "c++", "-"]
    macros = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    if "#define __SSE3__ " in macros:
        pytest.skip("this compiler's default is above x86-64's baseline")


def test_tiers(kernel_objects: Objects) -> None:
    """Each tier's translation unit keeps to its tier, and uses it: by the next lower one's rules it does not pass."""
    objects = kernel_objects.kernels(compiler())
    for source, tier in NAMESPACES.items():
        assert machine_code.above(objects[source], tier) == []
        assert machine_code.shared_functions(objects[source], tier) == []
        base, _ = machine_code.TIERS[tier]
        assert machine_code.above(objects[source], base), f"{tier} uses no instruction of its own"


def test_baseline(kernel_objects: Objects) -> None:
    """All others run on every x86-64 CPU."""
    objects = kernel_objects.kernels(compiler())
    rest = [source for source in KERNELS if source not in NAMESPACES]
    assert len(rest) >= 4
    for source in rest:
        assert machine_code.above(objects[source], None) == []


def test_library() -> None:
    """The same of the library as it is loaded, torch's inline functions included."""
    import torch_cpu_moe

    path = torch_cpu_moe.library_path()
    if path is None:
        pytest.skip("needs the library's file")
    functions = machine_code.instructions(Path(path))
    assert {machine_code.namespace(symbol) for symbol in functions} >= {None, "scalar", *NAMESPACES.values()}
    assert machine_code.above_by_namespace(Path(path)) == []


def test_emulated_tiers_need_no_instructions(kernel_objects: Objects) -> None:
    """Where portable code stands for a tier's instructions (test_kernels.py), all is baseline: it runs anywhere."""
    if not has_simde(compiler()):
        pytest.skip("needs SIMDe's headers (libsimde-dev)")
    for binary in kernel_objects.kernels(compiler(), emulated=True).values():
        assert machine_code.above(binary, None) == []


# ------------------------------------------------------------------------------------------------ that this can fail

IN_REGION = """
#include <immintrin.h>
#include "{root}/csrc/simd/target.h"
CPU_MOE_TARGET_BEGIN("{isa}")
{code}
CPU_MOE_TARGET_END
"""


def compile_unit(code: str, isa: str, folder: Path) -> Path:
    source, binary = folder / "unit.cpp", folder / "unit.o"
    source.write_text(IN_REGION.format(root=ROOT, isa=isa, code=code))
    done = subprocess.run(
        [*compiler(), "-std=c++20", "-O2", "-c", str(source), "-o", str(binary)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return binary


AVX512 = "avx512f,avx512bw,avx512dq,avx512vl"


@pytest.mark.parametrize(
    ("tier", "isa", "code", "found"),
    [
        ("avx2", AVX512, "__m512 f(__m512 a) { return _mm512_add_ps(a, a); }", "%zmm0"),
        ("avx2", AVX512, "__m256i f(__m256i a) { return _mm256_abs_epi64(a); }", "vpabsq"),
        ("avx512", AVX512 + ",avx512vnni", "__m512i f(__m512i a) { return _mm512_dpwssd_epi32(a, a, a); }", "vpdpwssd"),
        ("avx_vnni", AVX512 + ",avx512vnni", "__m256i f(__m256i a) { return _mm256_dpwssd_epi32(a, a, a); }", "{evex}"),
        ("avx512_vnni", "avx2,avxvnni", "__m256i f(__m256i a) { return _mm256_dpwssd_avx_epi32(a, a, a); }", "{vex}"),
        ("avx512", AVX512 + ",avx512vbmi", "__m512i f(__m512i a) { return _mm512_permutexvar_epi8(a, a); }", "vpermb"),
        (None, "avx", "__m128 f(__m128 a, __m128 b) { return _mm_add_ps(a, b); }", "vaddps"),
        (None, "ssse3", "__m128i f(__m128i a) { return _mm_shuffle_epi8(a, a); }", "pshufb"),
        (None, "popcnt", "int f(unsigned a) { return __builtin_popcount(a); }", "popcnt"),
        ("avx2", "avx2,bmi", "unsigned f(unsigned a, unsigned b) { return ~a & b; }", "andn"),
        # What the text alone does not tell.
        ("avx2", "avx2", 'void f() { asm volatile("{evex} vaddps %ymm0, %ymm1, %ymm2"); }', "{evex} vaddps"),
        ("avx2", "avx2", 'void f() { asm volatile("kmovw %eax, %k1"); }', "kmovw"),
    ],
)
def test_an_instruction_above_the_tier_is_found(
    tier: str | None, isa: str, code: str, found: str, tmp_path: Path
) -> None:
    binary = compile_unit(code, isa, tmp_path)
    findings = machine_code.above(binary, tier)
    assert findings and found in " ".join(findings)
    assert all("_Z1f" in finding for finding in findings)


def test_a_leak_is_found(tmp_path: Path) -> None:
    """Inline functions in a target region: in the tier's namespace, in another's, in none."""
    code = """
namespace cpu_moe::{space} {{
[[gnu::noinline]] inline float twice(__m256 a) {{ return _mm256_cvtss_f32(_mm256_add_ps(a, a)); }}
float kernels(__m256 a) {{ return twice(a); }}
}}
"""
    own = compile_unit(code.format(space="avx2"), "avx2", tmp_path)
    assert machine_code.shared_functions(own, "avx2") == [] == machine_code.above(own, "avx2")
    assert machine_code.above_by_namespace(own) == []
    assert len(machine_code.shared_functions(own, "avx_vnni")) == 2
    other = compile_unit(code.format(space="helpers"), "avx2", tmp_path)
    assert any("twice" in symbol for symbol in machine_code.shared_functions(other, "avx2"))
    assert any("twice" in finding for finding in machine_code.above_by_namespace(other))
