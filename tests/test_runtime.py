"""Threads, processes and machine state: THR-02, 03, 04, 06, AFF-01, 02, NUM-16, ISA-01, environment variables.

Most of it needs a process of its own. No time is asserted: time-outs are watchdogs against hangs, far above any run.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable

import pytest
import torch
from formats import FORMATS, make_bank, make_inputs, ops
from programs import PRINT_VALUE_ERROR, SETUP, cpus, linux
from reference import assert_bits

Python = Callable[..., str]


# ------------------------------------------------------------------------------------------------------------- import


@linux
def test_import_changes_nothing(python: Python) -> None:
    """No thread, affinity, float mode, torch setting or environment variable changes at import; no output either."""
    code = """
import ctypes, mmap, os, platform, torch
torch.ones(1 << 20).add_(1).sum()
def mxcsr():
    if platform.machine() not in ("x86_64", "AMD64"): return 0
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes([0x0F, 0xAE, 0x1F, 0xC3]))  # stmxcsr [rdi]; ret
    out = ctypes.c_uint32()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(page)))(ctypes.addressof(out))
    return out.value & ~0x3F
def state():
    return (sorted(os.listdir("/proc/self/task")), os.sched_getaffinity(0), torch.get_num_threads(),
            torch.get_num_interop_threads(), dict(os.environ), torch.get_default_dtype(), mxcsr())
before = state()
import torch_cpu_moe
after = state()
assert before == after, (before, after)
print("same")
"""
    assert python(code) == "same\n"


def test_importing_again_and_from_threads(python: Python) -> None:
    code = """
import threading
def load():
    import torch_cpu_moe
threads = [threading.Thread(target=load) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
import importlib, torch_cpu_moe, torch
importlib.reload(torch_cpu_moe)
print(torch.ops.cpu_moe.get_num_threads() >= 1)
"""
    assert python(code) == "True\n"


# ------------------------------------------------------------------------------------------------------------ threads


def test_thread_count_is_reported(threads: Callable[[int], None]) -> None:
    for n in (1, 3, 2):
        threads(n)
        assert ops.get_num_threads() == n
        bank = make_bank("bf16", 2, 32, 32)
        bank(*make_inputs(2, 32, 1, 2))
        assert ops.get_num_threads() == n


def test_default_thread_count(python: Python) -> None:
    """No more than the CPUs of the affinity mask, and what system_info says."""
    code = (
        SETUP + "print(json.dumps([torch.ops.cpu_moe.get_num_threads(), json.loads(torch.ops.cpu_moe.system_info())]))"
    )
    count, info = json.loads(python(code))
    assert 1 <= count <= len(cpus)
    assert str(count) in json.dumps(info)


def test_threads_variable(python: Python) -> None:
    code = SETUP + "call(); print(torch.ops.cpu_moe.get_num_threads())"
    assert python(code, CPU_MOE_THREADS="3") == "3\n"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "3 threads"])
def test_bad_threads_variable(value: str, python: Python) -> None:
    code = SETUP + PRINT_VALUE_ERROR
    out = python(code, CPU_MOE_THREADS=value)
    assert out.startswith("ValueError:") and "CPU_MOE_THREADS" in out and value in out, out


@linux
def test_more_threads_than_cpus(python: Python) -> None:
    """THR-02: eight threads on at most two CPUs, and beside busy loops: no practical hang in 2000 calls."""
    code = (
        SETUP
        + """
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
torch.ops.cpu_moe.set_num_threads(8)
want = call()
for _ in range(1000): assert torch.equal(call(), want)
import subprocess
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    for _ in range(1000): assert torch.equal(call(), want)
finally:
    for p in busy: p.kill(); p.wait()
print("done")
"""
    )
    assert python(code, timeout=300) == "done\n"


@linux
def test_idle_pool_costs_nothing(python: Python) -> None:
    """THR-03: after a call the workers sleep: less than 1% of one core over two seconds (CPU time, not wall time)."""
    code = (
        SETUP
        + """
torch.ops.cpu_moe.set_num_threads(4)
call()
time.sleep(0.2)  # the bounded spin is over
before = time.process_time()
time.sleep(2)
print(time.process_time() - before)
"""
    )
    assert float(python(code)) < 0.02


def test_results_under_changing_thread_counts(threads: Callable[[int], None]) -> None:
    """The pool is rebuilt between calls, up and down, with the same bits."""
    bank = make_bank("nvfp4", 4, 64, 64)
    args = make_inputs(3, 64, 2, 4)
    want = bank(*args)
    for n in (1, 4, 2, 9, 1, 3) * 5:
        threads(n)
        assert_bits(bank(*args), want, f"{n} threads")


def test_many_python_threads_at_once(threads: Callable[[int], None]) -> None:
    """Concurrent callers, different banks and sizes, one of them changing the thread count."""
    threads(2)
    cases = []
    for j, name in enumerate(FORMATS):
        bank = make_bank(name, 4, 64, 32, seed=j)
        args = make_inputs(1 + j * 3, 64, 2, 4, seed=j)
        cases.append((bank, args, bank(*args)))
    wrong: list[str] = []
    stop = threading.Event()

    def caller(bank, args, want) -> None:
        try:
            for _ in range(60):
                if not torch.equal(bank(*args), want):
                    wrong.append(str(bank.fmt))
        except Exception as error:
            wrong.append(repr(error))

    def resizer() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            ops.set_num_threads(1 + n % 4)
            time.sleep(0.002)

    workers = [threading.Thread(target=caller, args=c) for c in cases]
    other = threading.Thread(target=resizer)
    for t in (*workers, other):
        t.start()
    for t in workers:
        t.join(timeout=120)
        assert not t.is_alive(), "hang"
    stop.set()
    other.join()
    assert not wrong


def test_gil_is_released() -> None:
    """While one thread is inside a long call, another one runs Python: many steps fit between its start and its end."""
    bank = make_bank("f32", 2, 512, 512)
    m = 64
    while True:  # a call of at least 0.3 s, whatever the machine
        args = make_inputs(m, 512, 2, 2)
        start = time.perf_counter()
        bank(*args)
        if time.perf_counter() - start > 0.3:
            break
        m *= 2
    started, finished = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        bank(*args)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    steps = 0
    while not finished.is_set():
        time.sleep(0.01)
        steps += 1
    thread.join()
    assert steps >= 5  # with the GIL held: one, when the call is over


# -------------------------------------------------------------------------------------------------- fork, spawn, exit


@linux
def test_fork(python: Python) -> None:
    """THR-06: a child of a process with a pool computes with a pool of its own; the parent goes on."""
    code = (
        SETUP
        + """
import signal
torch.ops.cpu_moe.set_num_threads(3)
want = call()
def child():
    signal.alarm(60)
    ok = torch.equal(call(), want) and torch.ops.cpu_moe.get_num_threads() == 3
    torch.ops.cpu_moe.set_num_threads(2)
    ok = ok and torch.equal(call(), want)
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if torch.equal(call(), want) else 1)
    ok = ok and os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if ok else 1)
for _ in range(5):
    pid = os.fork()
    if pid == 0: child()
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(call(), want)
print("done")
"""
    )
    assert python(code) == "done\n"


@linux
def test_fork_while_another_thread_is_inside(python: Python) -> None:
    code = (
        SETUP
        + """
import signal
torch.ops.cpu_moe.set_num_threads(2)
want = call()
stop = threading.Event()
wrong = []
def loop():
    while not stop.is_set():
        if not torch.equal(call(), want): wrong.append(1)
threads = [threading.Thread(target=loop) for _ in range(2)]
for t in threads: t.start()
for _ in range(15):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if all(torch.equal(call(), want) for _ in range(3)) else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for t in threads: t.join()
assert not wrong
print("done")
"""
    )
    assert python(code, timeout=200) == "done\n"


class Items(torch.utils.data.Dataset):
    """Each item is computed by the operator inside a loader's worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> torch.Tensor:
        return make_bank("q4_0", 4, 32, 32)(*make_inputs(2, 32, 2, 4, seed=n))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader(method: str) -> None:
    """THR-06: DataLoader workers that call the operator, after the parent has used it."""
    items = Items()
    want = [items[n] for n in range(len(items))]
    context = multiprocessing.get_context(method)
    loader = torch.utils.data.DataLoader(
        items, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=180
    )
    for got, expected in zip(loader, want, strict=True):
        assert_bits(got, expected)
    assert_bits(items[0], want[0])


@pytest.mark.parametrize("how", ["plain", "daemon thread", "exit in a thread's call", "atexit"])
def test_interpreter_exit(how: str, python: Python) -> None:
    """The process ends with status 0 and without a hang, with the pool alive or in use."""
    tail = {
        "plain": "call()",
        "daemon thread": """
# (A daemon thread that is inside any torch operator at exit aborts the process: Python ends it there.)
ready = threading.Event()
def once(): call(); ready.set(); time.sleep(1000)
threading.Thread(target=once, daemon=True).start()
ready.wait()
""",
        "exit in a thread's call": """
t = threading.Thread(target=lambda: [call() for _ in range(200)])
t.start()
""",
        "atexit": """
import atexit
call()
atexit.register(call)
""",
    }[how]
    assert python(SETUP + "torch.ops.cpu_moe.set_num_threads(4)\n" + tail + '\nprint("end")') == "end\n"


# ------------------------------------------------------------------------------------------------- affinity and modes


@linux
@pytest.mark.parametrize("mask", [cpus[-1:], cpus[:1]], ids=["last", "first"])
def test_workers_stay_in_the_mask(mask: list[int], python: Python) -> None:
    """AFF-01: every thread's mask is a subset of the inherited one, whatever the number of threads."""
    if not shutil.which("taskset"):
        pytest.skip("needs taskset")
    code = (
        SETUP
        + """
masks = lambda: {tid: os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}
inherited = os.sched_getaffinity(0)
default = torch.ops.cpu_moe.get_num_threads()
call()
assert all(m <= inherited for m in masks().values()), masks()
torch.ops.cpu_moe.set_num_threads(5)
call()
assert all(m <= inherited for m in masks().values()), masks()
assert os.sched_getaffinity(0) == inherited
print(default)
"""
    )
    out = python(code, prefix=("taskset", "-c", ",".join(map(str, mask))))
    assert int(out) == len(mask)


@linux
@pytest.mark.parametrize("order", ["torch first", "operator first"])
@pytest.mark.parametrize(
    "env",
    [{}, {"OMP_PROC_BIND": "close"}, {"GOMP_CPU_AFFINITY": "0"}, {"KMP_AFFINITY": "granularity=fine,compact"}],
    ids=lambda e: next(iter(e), "none"),
)
def test_caller_is_left_alone(env: dict[str, str], order: str, python: Python) -> None:
    """AFF-02: the calling thread's mask, a new thread's mask and torch's thread count are the same after our calls."""
    code = """
import os, threading, torch
def masks():
    seen = [os.sched_getaffinity(0), torch.get_num_threads()]
    t = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    t.start(); t.join()
    return seen
def use_omp(): torch.randn(512, 512) @ torch.randn(512, 512)
"""
    if order == "torch first":
        code += "use_omp(); before = masks()\n" + SETUP + "for _ in range(5): call(); use_omp()\n"
    else:
        code += "import torch_cpu_moe\n" + SETUP + "before = masks()\nfor _ in range(5): call()\n"
    code += 'after = masks()\nassert before == after, (before, after)\nprint("same")'
    assert python(code, **env).endswith("same\n")


@linux
def test_mask_that_shrinks_after_the_pool_started(python: Python) -> None:
    """A cpuset that shrinks under a running process: calls go on (their pinning is refused or moved by the kernel)."""
    code = (
        SETUP
        + """
torch.ops.cpu_moe.set_num_threads(4)
want = call()
one = {min(os.sched_getaffinity(0))}
for tid in os.listdir("/proc/self/task"): os.sched_setaffinity(int(tid), one)
assert all(torch.equal(call(), want) for _ in range(50))
torch.ops.cpu_moe.set_num_threads(3)
assert torch.equal(call(), want)
assert all(os.sched_getaffinity(int(t)) <= one for t in os.listdir("/proc/self/task"))
print("done")
"""
    )
    assert python(code) == "done\n"


def read_mxcsr() -> int:
    """The SSE control register of this thread, by four bytes of machine code: stmxcsr [rdi]; ret."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\x0f\xae\x1f\xc3")
    out = ctypes.c_uint32()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(page)))(ctypes.addressof(out))
    return out.value


x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="MXCSR is x86's")


@x86
def test_float_mode_is_left_alone() -> None:
    """NUM-16: MXCSR is the same after calls as before, good ones and bad, flush mode on or off (flags aside)."""
    control = ~0x3F  # the low six bits are sticky exception flags, which any arithmetic sets
    bank = make_bank("q4_0", 4, 64, 64)
    args = make_inputs(3, 64, 2, 4)
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            before = read_mxcsr() & control
            assert bool(before & 0x8000) is flush
            bank(*args)
            ops.dequantize(bank.down, "q4_0", dtype=torch.float32)
            assert read_mxcsr() & control == before
            with pytest.raises(ValueError, match="format"):
                ops.experts(*args, bank.gate_up, bank.down, "no")
            assert read_mxcsr() & control == before
        finally:
            torch.set_flush_denormal(False)


# -------------------------------------------------------------------------------------------------------------- tiers


def test_tiers_are_told() -> None:
    """What is compiled, what runs here, what is active: best first, scalar always."""
    told = json.loads(ops.tiers())
    assert told["compiled"][-1] == told["supported"][-1] == "scalar"
    assert set(told["supported"]) <= set(told["compiled"])
    assert (told["active"] == told["supported"][0] and told["requested"] is None) or "CPU_MOE_ISA" in os.environ


def test_every_format_on_every_tier(tier: str) -> None:
    """ISA-04: no tier lacks a format."""
    assert json.loads(ops.tiers())["active"] == tier and json.loads(ops.tiers())["requested"] == tier
    for name in FORMATS:
        make_bank(name, 2, 64, 64).check(*make_inputs(2, 64, 1, 2))


@pytest.mark.parametrize("name", json.loads(ops.tiers())["supported"])
def test_isa_variable(name: str, python: Python) -> None:
    """CPU_MOE_ISA caps the tier, and "auto" means what it says."""
    code = SETUP + 'call(); print(json.loads(torch.ops.cpu_moe.tiers())["active"])'
    assert python(code, CPU_MOE_ISA=name) == f"{name}\n"
    again = (
        SETUP
        + """
torch.ops.cpu_moe.set_tier("scalar"); torch.ops.cpu_moe.set_tier("auto"); call()
print(json.loads(torch.ops.cpu_moe.tiers())["active"])
"""
    )
    assert python(again, CPU_MOE_ISA=name) == f"{name}\n"


@pytest.mark.parametrize("value", ["sse9", "AVX2", "avx2 "])
def test_bad_isa_variable(value: str, python: Python) -> None:
    """ISA-01: an unknown tier raises and lists the valid ones; it does not fall back in silence."""
    code = SETUP + PRINT_VALUE_ERROR
    out = python(code, CPU_MOE_ISA=value)
    assert out.startswith("ValueError:") and "CPU_MOE_ISA" in out and value in out and "scalar" in out, out


# -------------------------------------------------------------------------------------------------------- stream_read


def test_stream_read() -> None:
    """The bandwidth ceiling's read: every variant runs, any size, and tells bad arguments."""
    data = torch.arange(1 << 20, dtype=torch.int32)
    for variant in range(ops.stream_read_variants()):
        first = ops.stream_read(data, variant)
        assert ops.stream_read(data, variant) == first
        other = data.clone()
        other[777_777] += 1
        assert ops.stream_read(other, variant) != first, "the checksum does not see every byte"
    for size in (0, 1, 63, 4097):
        ops.stream_read(torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match="variant"):
        ops.stream_read(data, ops.stream_read_variants())
    with pytest.raises(ValueError, match="data"):
        ops.stream_read(data.reshape(1024, 1024).T)
