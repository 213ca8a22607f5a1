"""Tasks of one op on the threads torch may use; results do not depend on their number.

A kernel's tasks run on threads that wait in compiled code: an op is too short to wake them, and to have each of them
unpack its operands under the interpreter's lock. The caller unpacks them once, writes down where they are, and works
with the others (`handover`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from types import FunctionType
from typing import Any

import numba.extending
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher

from glm5_kernels.compiled.handover import (
    ALONE,
    MONOTONIC,
    MOST,
    TASK_CODE,
    Calls,
    Memory,
    lead,
    new_memory,
    run_calls,
    serve,
)
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import I64

#: Bytes that a thread reads at a time, at least: fewer are read sooner than another thread has begun.
LEAST_BYTES = 2**17
#: Tokens of a step whose products are all compiled ones: torch computes next to nothing.
FEW_TOKENS = 16
#: The `recording.Recording` of the calls that are made now.
recorder: Any = None
#: Threads of an op, once `share_cores` has given torch others; 0: as many as torch's.
_own = 0


def count() -> int:
    """Threads of an op: as many as torch's, or as torch had before `share_cores`."""
    return _own or torch.get_num_threads()


def share_cores(tokens: int) -> None:
    """Give torch one thread for a step of few tokens, or while other processes use the cores, else all.

    Its threads are not those of an op, which wait for the next op on the same cores: in a small step each hand-over to
    OpenMP's threads takes longer than what they compute.
    """
    global _own
    _own = count()
    alone = tokens <= FEW_TOKENS or team(os.getpid()).works_alone()
    if torch.get_num_threads() != (number := 1 if alone else _own):
        torch._C.set_num_threads(number)  # vLLM replaces torch.set_num_threads by a warning


def run_tasks(function: Callable[[int], object], tasks: int) -> None:
    """Run the Python function for 0 .. tasks - 1 on all threads of an op, this one among them.

    Compiled functions that it calls release the interpreter's lock.
    """
    threads = 1 if team(os.getpid()).works_alone() else min(count(), tasks)
    numbers = iter(range(tasks))  # each number is given out once: `next` holds the interpreter's lock

    def work() -> None:
        for number in numbers:
            function(number)

    others = [_pool(os.getpid(), threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:  # also after an error: they use the operands; one that has not begun is not waited for
        others = [other for other in others if not other.cancel()]
        wait(others)
    for other in others:
        other.result()


def run_ranges(function: Callable[..., object], tasks: int, size: int, *operands: Any) -> None:
    """Run function(first, last, *operands) for tasks 0 .. tasks - 1 on all threads, at least `size` at a time.

    A task runs on its own, so any number of threads gives the same bits; with one, a single call takes all tasks.
    """
    size, threads = max(1, size), count()
    parts = -(-tasks // size)
    if recorder is not None:
        recorder.add_kernel(function, tasks, size, operands)
    if threads == 1:
        function(0, tasks, *operands)
    elif isinstance(function, Dispatcher):  # also few tasks, so that a warm-up compiles what other sizes need
        team(os.getpid()).run(function, max(1, min(threads, parts)), tasks, size, *operands)
    else:
        run_tasks(lambda index: function(index * size, min((index + 1) * size, tasks), *operands), parts)


def run_whole(function: Callable[..., object], tasks: int, *operands: Any) -> None:
    """Run function(0, tasks, *operands) on this thread: all tasks of an op that is too short for others."""
    if recorder is not None:
        recorder.add_kernel(function, tasks, max(1, tasks), operands)
    function(0, tasks, *operands)


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
        memory: int64, what the threads tell each other. size: threads, the caller among them.
    """

    def __init__(self) -> None:
        self._lock, self.memory, self.size = threading.Lock(), new_memory(), 1

    def run(self, function: Any, threads: int, count: int, size: int, *operands: Any) -> None:
        """Run the kernel for tasks 0 .. count - 1."""
        if specialized(_entry, function)(self.memory, self._grown(threads), count, size, *operands):
            raise MemoryError(f"{function.__name__} failed")  # compiled code has no other error

    def run_calls(self, calls: Calls) -> None:
        """Run the recorded calls of kernels."""
        if run_calls(self.memory, self._grown(count()), calls):
            raise MemoryError("a recorded kernel failed")

    def _grown(self, threads: int) -> int:
        """Start the threads that are missing; returns how many of so many there are."""
        while self.size < min(threads, MOST):
            with self._lock:
                threading.Thread(target=self._work, args=(self.size,), daemon=True).start()
                self.size += 1
        return min(threads, self.size)

    def works_alone(self) -> bool:
        """True while the caller works alone because the system has stopped another thread."""
        return time.monotonic_ns() < int(self.memory[ALONE])

    def _work(self, number: int) -> None:
        cpus = os.environ.get("GOMP_CPU_AFFINITY", "").split()  # OpenMP binds the caller, whose mask is inherited
        if number < len(cpus) and cpus[number].isdecimal():
            os.sched_setaffinity(0, [int(cpus[number])])
        linux = hasattr(time, "pthread_getcpuclockid")
        serve(self.memory, number, time.pthread_getcpuclockid(threading.get_ident()) if linux else MONOTONIC)


@cache
def specialized(entry: FunctionType, function: Any) -> Any:
    """The entry, a function of a kernel's operands, compiled for one kernel and cached on disk like the kernel."""
    source = function.py_func
    where = {"co_filename": source.__code__.co_filename, "co_firstlineno": source.__code__.co_firstlineno}
    name = source.__name__ + entry.__name__
    copy = FunctionType(entry.__code__.replace(**where), {**entry.__globals__, "function": function}, name)
    copy.__module__, copy.__qualname__ = source.__module__, name
    return kernel(copy)


def _entry(memory: Memory, threads: int, count: int, size: int, *operands: Any) -> int:
    task, packed = _job(function, operands)  # noqa: F821 - a global of each copy
    return lead(memory, threads, count, size, task, packed)  # type: ignore[no-any-return]


def task_code(typing: Any, function: Any, operands: Any) -> Any:
    """A function that emits C code (operands, first, last) -> 1 after an error, else 0, of a kernel: its address."""
    call = function.get_call_type(typing, (types.int64, types.int64, *operands.types), {})

    def generate(context: Any, builder: Any) -> Any:
        compiled = function.dispatcher.overloads[call.args]
        context.active_code_library.add_linking_library(compiled.library)
        task = ir.Function(builder.module, TASK_CODE, f"{builder.function.name}.task")
        task.linkage = "internal"
        inside = ir.IRBuilder(task.append_basic_block())
        packed, *bounds = task.args
        kind = context.get_value_type(operands)
        loaded = inside.load(inside.inttoptr(packed, kind.as_pointer()))
        unpacked = [*bounds, *cgutils.unpack_tuple(inside, loaded, len(operands.types))]
        callee = context.declare_function(builder.module, compiled.fndesc)
        status, _ = context.call_conv.call_function(inside, callee, call.return_type, call.args, unpacked)
        inside.ret(inside.zext(status.is_error, I64))
        return builder.ptrtoint(task, I64)

    return generate


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _job(typing: Any, function: Any, operands: Any) -> Any:
    """(address of the kernel's `task_code`; address of the operands on the stack)."""
    code = task_code(typing, function, operands)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        slot = builder.ptrtoint(cgutils.alloca_once_value(builder, values[1]), I64)
        return context.make_tuple(builder, signature.return_type, [code(context, builder), slot])

    return types.UniTuple(types.int64, 2)(function, operands), generate
