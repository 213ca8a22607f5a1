"""Tasks of one op on the threads torch may use; results do not depend on their number."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch


def run_tasks(function: Callable[[int], object], count: int) -> None:
    """Run function(0) ... function(count - 1); compiled functions release the interpreter's lock.

    As many threads as `torch.get_num_threads()`, this one among them; task i runs on its own, so any number gives the
    same bits.
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
    """Run function(first, last, *operands) for tasks 0 .. count - 1, `size` tasks at a time, on all threads.

    With one thread a single call takes all tasks.
    """
    size = max(1, count if torch.get_num_threads() == 1 else size)
    run_tasks(lambda index: function(index * size, min((index + 1) * size, count), *operands), -(-count // size))


@cache
def _pool(_: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process (threads do not survive a fork) and size."""
    return ThreadPoolExecutor(threads, thread_name_prefix="glm5-kernels")
