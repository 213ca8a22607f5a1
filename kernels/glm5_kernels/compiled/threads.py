"""Tasks of one op on the threads torch may use; results do not depend on their number.

A kernel's tasks run on threads that wait in compiled code: an op is too short to wake them, and to have each of them
unpack its operands under the interpreter's lock. The caller unpacks them once, writes down where they are, and works
with the others. A thread that waits for long sleeps until the next op. One that comes too late is not waited for.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from types import FunctionType
from typing import Any

import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import I32, I64, Lanes, call_llvm, intrinsic

#: Bytes that a thread reads at a time, at least: fewer are read sooner than another thread has begun.
LEAST_BYTES = 2**17
Memory = NDArray[np.int64]
#: Elements of a team's memory, cache lines apart. JOB: number of the op whose tasks wait, 0: none. INSIDE: threads that
#: work on it. NEXT: its first task that nobody has taken.
JOB, INSIDE, NEXT = 0, 8, 16
#: Written before JOB: the last number; the addresses of `_job`; tasks, and how many are taken at a time; threads that
#: may come. FAILED: 1 after an error.
LAST, TASK, OPERANDS, COUNT, SIZE, THREADS, FAILED = range(24, 31)
#: Parts of an op's tasks for each thread, so that all end at about the same time.
_PARTS = 16
#: Rounds of waiting before a thread sleeps, some tenths of a millisecond; and before the caller gives up its core.
_ROUNDS, _PATIENCE = 10_000, 2_000
_TASK_CODE = ir.FunctionType(I64, [I64, I64, I64])
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def run_tasks(function: Callable[[int], object], count: int) -> None:
    """Run the Python function for 0 .. count - 1 on as many threads as `torch.get_num_threads()`, this one among them.

    Compiled functions that it calls release the interpreter's lock.
    """
    threads = min(torch.get_num_threads(), count)
    numbers = iter(range(count))  # each number is given out once: `next` holds the interpreter's lock

    def work() -> None:
        for number in numbers:
            function(number)

    others = [_pool(os.getpid(), threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:  # also after an error: they use the operands
        wait(others)
    for other in others:
        other.result()


def run_ranges(function: Callable[..., object], count: int, size: int, *operands: Any) -> None:
    """Run function(first, last, *operands) for tasks 0 .. count - 1 on all threads, at least `size` at a time.

    A task runs on its own, so any number of threads gives the same bits; with one, a single call takes all tasks.
    """
    size, threads = max(1, size), torch.get_num_threads()
    parts = -(-count // size)
    if threads == 1:
        function(0, count, *operands)
    elif isinstance(function, Dispatcher):  # also few tasks, so that a warm-up compiles what other sizes need
        team(os.getpid()).run(function, max(1, min(threads, parts)), count, size, *operands)
    else:
        run_tasks(lambda index: function(index * size, min((index + 1) * size, count), *operands), parts)


@cache
def _pool(_: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process (threads do not survive a fork) and size."""
    return ThreadPoolExecutor(threads, thread_name_prefix="glm5-kernels")


@cache
def team(_: int) -> Team:
    """The threads of a process with this number: they do not survive a fork."""
    return Team()


class Team:
    """The threads of a process that work on its kernels' tasks.

    Attributes:
        awake: an event for each thread but the caller; one that is not set sleeps.
    """

    def __init__(self) -> None:
        self.awake: list[threading.Event] = []
        self._lock, memory = threading.Lock(), np.zeros(48, np.int64)
        self._memory = memory[-memory.ctypes.data % 64 // 8 :]

    def run(self, function: Any, threads: int, count: int, size: int, *operands: Any) -> None:
        """Run the kernel for tasks 0 .. count - 1; while another caller does so, on this thread alone."""
        if not self._lock.acquire(blocking=False):
            function(0, count, *operands)
            return
        try:
            while len(self.awake) < threads - 1:
                self.awake.append(threading.Event())
                threading.Thread(target=self._work, args=(len(self.awake),), daemon=True).start()
            for event in self.awake[: threads - 1]:
                event.set()
            if _on_all_threads(function)(self._memory, threads, count, size, *operands):
                raise MemoryError(f"{function.__name__} failed")  # compiled code has no other error
        finally:
            self._lock.release()

    def _work(self, number: int) -> None:
        cpus = os.environ.get("GOMP_CPU_AFFINITY", "").split()  # OpenMP binds the caller, whose mask is inherited
        if number < len(cpus) and cpus[number].isdecimal():
            os.sched_setaffinity(0, [int(cpus[number])])
        event = self.awake[number - 1]
        while True:
            event.wait()
            _serve(self._memory, number)
            event.clear()  # an event that is set right now is lost, and the thread misses that op


@cache
def _on_all_threads(function: Any) -> Any:
    """The compiled code that hands a kernel's operands to all threads, cached on disk like the kernel."""
    source = function.py_func
    where = {"co_filename": source.__code__.co_filename, "co_firstlineno": source.__code__.co_firstlineno}
    code = _entry.__code__.replace(**where)
    entry = FunctionType(code, {"function": function, "_job": _job, "_lead": _lead}, f"{source.__name__}_on_all")
    entry.__module__, entry.__qualname__ = source.__module__, entry.__name__
    return kernel(entry)


def _entry(memory: Memory, threads: int, count: int, size: int, *operands: Any) -> int:
    task, packed = _job(function, operands)  # noqa: F821 - a global of each copy
    return _lead(memory, threads, count, size, task, packed)  # type: ignore[no-any-return]


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _job(typing: Any, function: Any, operands: Any) -> Any:
    """(address of C code (operands, first, last) -> 1 after an error, else 0; address of the operands on the stack)."""
    call = function.get_call_type(typing, (types.int64, types.int64, *operands.types), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = function.dispatcher.overloads[call.args]
        context.active_code_library.add_linking_library(compiled.library)
        task = ir.Function(builder.module, _TASK_CODE, f"{builder.function.name}.task")
        task.linkage = "internal"
        inside = ir.IRBuilder(task.append_basic_block())
        packed, *bounds = task.args
        kind = context.get_value_type(operands)
        loaded = inside.load(inside.inttoptr(packed, kind.as_pointer()))
        unpacked = [*bounds, *cgutils.unpack_tuple(inside, loaded, len(operands.types))]
        callee = context.declare_function(builder.module, compiled.fndesc)
        status, _ = context.call_conv.call_function(inside, callee, call.return_type, call.args, unpacked)
        inside.ret(inside.zext(status.is_error, I64))
        slot = cgutils.alloca_once_value(builder, values[1])
        addresses = [builder.ptrtoint(pointer, I64) for pointer in (task, slot)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return types.UniTuple(types.int64, 2)(function, operands), generate


@kernel
def _lead(memory: Memory, threads: int, count: int, size: int, task: int, packed: int) -> int:
    """Put out the tasks, work on them, and wait for those who work on them, too; 1 after an error."""
    address, rounds = memory.ctypes.data, 0
    job = memory[LAST] + 1
    memory[LAST], memory[TASK], memory[OPERANDS], memory[COUNT], memory[NEXT] = job, task, packed, count, 0
    memory[THREADS], memory[SIZE], memory[FAILED] = threads, max(size, count // (_PARTS * threads)), 0
    _add(address + 8 * JOB, job)
    _take(memory)
    _add(address + 8 * JOB, -job)
    while _load(address + 8 * INSIDE):
        rounds += 1
        if rounds < _PATIENCE:
            _relax()
        else:
            _sched_yield()
    return int(memory[FAILED])


@kernel
def _serve(memory: Memory, number: int) -> None:
    """Work on every op with more than `number` threads, until none has come for a while."""
    address, done, idle = memory.ctypes.data, 0, 0
    while idle < _ROUNDS:
        job = _load(address + 8 * JOB)
        if job == 0 or job == done:
            _relax()
            idle += 1
            continue
        _add(address + 8 * INSIDE, 1)
        if _load(address + 8 * JOB) == job and number < memory[THREADS]:  # the caller waits for this thread
            _take(memory)
            idle = 0
        _add(address + 8 * INSIDE, -1)
        done = job


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
def _call(v: Lanes, task: Any, packed: Any, first: Any, last: Any) -> Any:
    return v.builder.call(v.builder.inttoptr(task, _TASK_CODE.as_pointer()), [packed, first, last])


@intrinsic()
def _relax(v: Lanes) -> None:
    """The instruction for a loop that waits."""
    name, operands = (
        ("x86.sse2.pause", []) if platform.machine() == "x86_64" else ("aarch64.hint", [ir.Constant(I32, 1)])
    )
    call_llvm(v.builder, ir.VoidType(), name, *operands)
