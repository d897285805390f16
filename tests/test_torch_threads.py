"""torch's own threads beside the pool's (csrc/ops/torch_threads.h): HYB-01, THR-06 and CPU_MOE_OPENMP."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from programs import PRINT_VALUE_ERROR, SETUP, cpus, linux

Python = Callable[..., str]

# torch's team of two, started, and two ways to call: the layer, and the layer after one of torch's parallel operators.
OPENMP = (
    SETUP
    + """
torch.set_num_threads(2)
tasks = lambda: set(os.listdir("/proc/self/task"))
before = tasks()
big = torch.ones(1 << 21)
big.add_(1).sum()
torch_threads = sorted(tasks() - before)
big_bank = formats.make_bank("bf16", 4, 512, 512)
big_args = formats.make_inputs(3, 512, 2, 4)
def mixed():
    big.add_(1).sum()
    return big_bank(*big_args)
"""
)


@linux
@pytest.mark.skipif(len(cpus) < 2, reason="on one CPU torch has no second thread to spin")
def test_torch_threads_sleep_while_an_operator_runs(python: Python) -> None:
    """HYB-01: they would spin on the cores of the pool. Counted is the CPU time that they use during a call."""
    code = (
        OPENMP
        + """
used = lambda: sum(int(open(f"/proc/self/task/{t}/schedstat").read().split()[0]) for t in torch_threads)
want = mixed()
state = lambda: (tasks(), sorted(os.sched_getaffinity(0)), torch.get_num_threads())
for _ in range(5): mixed()
steady, spent = state(), []
for _ in range(200):
    big.add_(1).sum()
    start = used()
    out = big_bank(*big_args)
    spent.append(used() - start)
    assert torch.equal(out, want)
assert state() == steady
print(json.dumps([len(torch_threads), sorted(spent)]))
"""
    )
    count, spun = json.loads(python(code, CPU_MOE_THREADS="2"))
    assert count == 1
    _, kept = json.loads(python(code, CPU_MOE_THREADS="2", CPU_MOE_OPENMP="keep"))
    # Other processes may delay both, in some calls: compare a usual call with what spinning comes to on average.
    assert spun[len(spun) // 2] < sum(kept) / len(kept) / 4, (spun, kept)


@linux
def test_torch_threads_and_fork(python: Python) -> None:
    """THR-06: OpenMP's threads do not exist in a child; the operator must not wait for them."""
    code = (
        OPENMP
        + """
want = [mixed() for _ in range(6)][-1]
child = os.fork()
if child == 0:
    for _ in range(6): assert torch.equal(big_bank(*big_args), want)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(mixed(), want)
print("done")
"""
    )
    assert python(code, CPU_MOE_THREADS="2") == "done\n"


@linux
def test_torch_threads_in_several_threads_and_sizes(python: Python) -> None:
    """Every thread has a team of its own, whose size may change, and which may be smaller than asked for."""
    code = (
        OPENMP
        + """
want, errors = mixed(), []
def body(n):
    try:
        for i in range(30):
            torch.set_num_threads(1 + (i // 5 + n) % 3)
            out = mixed()
            assert torch.equal(out, want)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=body, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(errors or "done")
"""
    )
    assert python(code, CPU_MOE_THREADS="2") == "done\n"
    assert python(code, CPU_MOE_THREADS="2", OMP_THREAD_LIMIT="2") == "done\n"
    assert python(code, CPU_MOE_THREADS="2", OMP_DYNAMIC="true") == "done\n"


@linux
def test_an_exception_leaves_torch_threads_awake(python: Python) -> None:
    """What a call throws passes through the region that keeps torch's threads asleep, and the next call works."""
    code = (
        OPENMP
        + """
import resource
want = [mixed() for _ in range(6)][-1]
many = formats.make_inputs(4096, 512, 2, 4)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), -1))  # no room for the scratch of 4096 tokens
big.add_(1).sum()
try:
    big_bank(*many)
    print("no error")
except (MemoryError, RuntimeError) as error:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert torch.equal(mixed(), want)
print("done")
"""
    )
    assert python(code, CPU_MOE_THREADS="2") == "done\n"


def test_bad_openmp_variable(python: Python) -> None:
    code = SETUP + PRINT_VALUE_ERROR
    out = python(code, CPU_MOE_OPENMP="yes")
    assert out.startswith("ValueError:") and 'CPU_MOE_OPENMP="yes"' in out and "auto or keep" in out, out
