"""Threads that share the work of one process without changing a bit of its results.

Every task computes with one BLAS thread, so a sum is added up in the same order whatever the number of workers is, and
the tasks themselves are independent. torch releases the interpreter lock inside its operations.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Workers:
    """A pool of `count` threads; a context manager that puts torch's own thread count back.

    Attributes:
        stopping: results are no longer wanted: a long task may return early.
    """

    def __init__(self, count: int) -> None:
        self.count, self.stopping = count, False
        self._before = torch.get_num_threads()

    def __enter__(self) -> Workers:
        torch.set_num_threads(1)
        _initialize_math_library()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="worker")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of `items`.

        At most twice as many tasks as threads run or wait to be collected, which bounds memory: with fewer, threads
        would wait for a long task in front of short ones.
        """

        def run(item: Item) -> Result:
            with torch.no_grad():  # a property of the thread
                return function(item)

        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                if len(waiting) >= 2 * self.count:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(run, item))
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            self.stopping = True
            raise
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)  # whatever still runs may use what the caller closes next

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let a task that runs alone, in this thread, compute with all threads of torch: its last bits may depend on
        their number."""
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def for_each(self, function: Callable[[Item], object], items: Iterable[Item]) -> None:
        for _ in self.map(function, items):
            pass


def in_order(workers: Workers | None, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results in the order of `items`: by workers, or one after the other in this thread."""
    return map(function, items) if workers is None else workers.map(function, items)


def _initialize_math_library() -> None:
    """Let MKL select its code for this processor now, in one thread.

    It does so at the first call of a vector function; two threads that called first at the same time got different
    last bits (about one process start in a hundred, torch 2.13.0).
    """
    x = torch.ones(64, 64)
    for function in (torch.cos, torch.sin, torch.log, torch.exp):
        function(x)
    x @ x
