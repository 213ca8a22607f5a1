"""How the threads of an op tell each other of its tasks, in compiled code.

The caller puts the tasks out; each thread takes some at a time. A thread without work waits for the next op, and sleeps
after a while; one that comes too late is not waited for. Where others use the cores, too, the system stops a thread in
the middle of a task, for longer than all tasks take. The caller sleeps until that one has ended, and then works alone
for a while: the next op would meet with the same.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import I32, I64, Lanes, call_llvm, i64_const, intrinsic

Memory = NDArray[np.int64]
Calls = NDArray[np.int64]
#: Elements of a team's memory, cache lines apart. JOB: number of the op whose tasks wait, 0: none. CALLED: 1 while a
#: caller has the team. NEXT: the op's first task that nobody has taken.
JOB, CALLED, NEXT = 0, 1, 8
#: Written before JOB: the addresses of `_job`; tasks, and how many are taken at a time; threads that may come. FAILED:
#: 1 after an error. The caller's own: the last number; the time until which it works alone.
TASK, OPERANDS, COUNT, SIZE, THREADS, FAILED, LAST, ALONE = range(16, 24)
#: Of each other thread, LINE times its number behind: BUSY and ASLEEP, 0 or 1; the lock that it sleeps in; the clock of
#: its time on a processor.
BUSY, ASLEEP, LOCK, CLOCK, LINE = *range(16, 20), 8
#: Threads of a team, at most.
MOST = 1024
#: Parts of an op's tasks for each thread, so that all end at about the same time.
_PARTS = 16
#: Nanoseconds: a thread waits so long before it sleeps; the caller waits so long for another, then sleeps for so long.
_AWAKE, _PATIENCE, _NAP = 300_000, 100_000, 50_000
#: The caller works alone for so many times the time that was lost.
_ALONE = 16
#: Nanoseconds that are too many to lose, however long the tasks took.
_MUCH = 1_000_000
TASK_CODE = ir.FunctionType(I64, [I64, I64, I64])
_CLOCK_CODE = ir.FunctionType(I32, [I32, I64.as_pointer()])
MONOTONIC = time.CLOCK_MONOTONIC
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_allocate_lock = types.ExternalFunction("PyThread_allocate_lock", types.int64())
_acquire_lock = types.ExternalFunction("PyThread_acquire_lock", types.int32(types.int64, types.int32))
_release_lock = types.ExternalFunction("PyThread_release_lock", types.void(types.int64))


def new_memory() -> Memory:
    """Memory of a team, at the start of a cache line."""
    memory = np.zeros(BUSY + LINE * (MOST + 1), np.int64)
    return memory[-memory.ctypes.data % 64 // 8 :]


@kernel
def lead(memory: Memory, threads: int, count: int, size: int, task: int, packed: int) -> int:
    """Put out the tasks, work on them, and wait for those who work on them, too; 1 after an error.

    A caller works alone while another one has the team. No signal of Python's can come before the team is free again.
    """
    began, first = _now(MONOTONIC), memory.ctypes.data
    if threads == 1 or began < memory[ALONE] or _exchange(first + 8 * CALLED, 1):
        return _call(task, packed, 0, count)  # type: ignore[no-any-return]
    job = memory[LAST] + 1
    memory[LAST], memory[TASK], memory[OPERANDS], memory[COUNT], memory[NEXT] = job, task, packed, count, 0
    memory[THREADS], memory[SIZE], memory[FAILED] = threads, max(size, count // (_PARTS * threads)), 0
    _exchange(first + 8 * JOB, job)
    for number in range(1, threads):
        _wake(first + 8 * LINE * number)
    _take(memory)
    _exchange(first + 8 * JOB, 0)
    ended, lost = _now(MONOTONIC), 0
    for number in range(1, threads):
        lost = max(lost, _wait(first + 8 * LINE * number))
    if lost > min(ended - began, _MUCH):  # more than the others' work was worth; the caller may have been stopped, too
        memory[ALONE] = _now(MONOTONIC) + _ALONE * lost
    failed = memory[FAILED]
    _exchange(first + 8 * CALLED, 0)
    return int(failed)


@kernel
def run_calls(memory: Memory, threads: int, calls: Calls) -> int:
    """Run calls int64 [n, 4] of (task code, operands, tasks, how many are taken at a time); 1 after an error."""
    failed = 0
    for number in range(len(calls)):
        task, packed, count, size = calls[number, 0], calls[number, 1], calls[number, 2], calls[number, 3]
        failed |= lead(memory, max(1, min(threads, -(-count // size))), count, size, task, packed)
    return failed


@kernel
def _wake(line: int) -> None:
    """Wake the thread if it sleeps."""
    if _load(line + 8 * ASLEEP) and _exchange(line + 8 * ASLEEP, 0):
        _release_lock(_load(line + 8 * LOCK))


@kernel
def _wait(line: int) -> int:
    """Wait for the thread to end its task; nanoseconds for which the system has stopped it."""
    began = _now(MONOTONIC)
    while _now(MONOTONIC) < began + _PATIENCE:
        if not _load(line + 8 * BUSY):
            return 0
        _relax()
    began, ran = _now(MONOTONIC), _now(_load(line + 8 * CLOCK))
    while _load(line + 8 * BUSY):
        _usleep(_NAP // 1000)
    return _now(MONOTONIC) - began - (_now(_load(line + 8 * CLOCK)) - ran)  # type: ignore[no-any-return]


@kernel
def serve(memory: Memory, number: int, clock: int) -> None:
    """Work on every op with more than `number` threads, for ever; sleep while none comes."""
    first, lock, done = memory.ctypes.data, _allocate_lock(), 0
    line = first + 8 * LINE * number
    _acquire_lock(lock, 1)
    _exchange(line + 8 * LOCK, lock)
    _exchange(line + 8 * CLOCK, clock)
    since = _now(MONOTONIC)
    while True:
        job = _load(first + 8 * JOB)
        if job != 0 and job != done:
            _exchange(line + 8 * BUSY, 1)
            if _load(first + 8 * JOB) == job and number < memory[THREADS]:  # the caller waits for this thread
                _take(memory)
                since = _now(MONOTONIC)
            _exchange(line + 8 * BUSY, 0)
            done = job
        elif _now(MONOTONIC) < since + _AWAKE:
            _sched_yield()  # to OpenMP's threads, or to other processes
        else:
            _exchange(line + 8 * ASLEEP, 1)
            job = _load(first + 8 * JOB)
            if job == 0 or job == done or not _exchange(line + 8 * ASLEEP, 0):
                _acquire_lock(lock, 1)  # until the caller has released it
            since = _now(MONOTONIC)


@kernel
def _take(memory: Memory) -> None:
    """Work on the next tasks until all are taken."""
    following, count, size = memory.ctypes.data + 8 * NEXT, memory[COUNT], memory[SIZE]
    first = _add(following, size)
    while first < count:
        if _call(memory[TASK], memory[OPERANDS], first, min(first + size, count)):
            memory[FAILED] = 1
        first = _add(following, size)


@intrinsic(types.int64)
def _load(v: Lanes, address: Any) -> Any:
    return v.builder.load_atomic(v.builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@intrinsic(types.int64)
def _add(v: Lanes, address: Any, value: Any) -> Any:
    """The value before."""
    return v.builder.atomic_rmw("add", v.builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@intrinsic(types.int64)
def _exchange(v: Lanes, address: Any, value: Any) -> Any:
    """The value before."""
    return v.builder.atomic_rmw("xchg", v.builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@intrinsic(types.int64)
def _now(v: Lanes, clock: Any) -> Any:
    """Nanoseconds."""
    builder = v.builder
    time_of = cgutils.get_or_insert_function(builder.module, _CLOCK_CODE, "clock_gettime")
    parts = cgutils.alloca_once(builder, I64, 2)
    builder.call(time_of, [builder.trunc(clock, I32), parts])
    seconds, rest = (builder.load(builder.gep(parts, [i64_const(i)])) for i in range(2))
    return builder.add(builder.mul(seconds, i64_const(10**9)), rest)


@intrinsic(types.int64)
def _call(v: Lanes, task: Any, packed: Any, first: Any, last: Any) -> Any:
    return v.builder.call(v.builder.inttoptr(task, TASK_CODE.as_pointer()), [packed, first, last])


@intrinsic()
def _relax(v: Lanes) -> None:
    """The instruction for a loop that waits."""
    name, operands = (
        ("x86.sse2.pause", []) if platform.machine() == "x86_64" else ("aarch64.hint", [ir.Constant(I32, 1)])
    )
    call_llvm(v.builder, ir.VoidType(), name, *operands)
