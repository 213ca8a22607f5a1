"""The threads of one op: the same bits with any number of them, errors, forks, several callers, sleep, busy cores."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import types
from numpy.typing import NDArray

from glm5_kernels.compiled import handover, threads
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.ops import PER_TOKEN, LinearWeights, int8_linear, share_cores

usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
thread_self = types.ExternalFunction("pthread_self", types.int64())


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    threads._own = 0
    torch.set_num_threads(before)


@kernel
def count_up(first: int, last: int, out: NDArray[np.int64], bad: int) -> None:
    """Add 1 to tasks first..last; task `bad` raises."""
    for task in range(first, last):
        if task == bad:
            raise ValueError("a bad task")
        out[task] += task


def done_once(count: int, size: int, bad: int = -1) -> bool:
    out = np.zeros(count, np.int64)
    threads.run_ranges(count_up, count, size, out, bad)
    return bool((out == np.arange(count)).all())


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_every_task_runs_once(number: int) -> None:
    """More threads than cores, and than tasks; the number changes from op to op."""
    for count in (0, 1, 2, 7, 1000):
        for size in (0, 1, 64):
            for threads_now in (number, 2):
                torch.set_num_threads(threads_now)
                assert all(done_once(count, size) for _ in range(20))


def test_a_layer_has_the_same_bits() -> None:
    w = LinearWeights(torch.randint(-127, 128, (1056, 1024), dtype=torch.int8), PER_TOKEN, torch.rand(1056))
    for tokens in (1, 5):
        x = torch.randn(tokens, 1024)
        results = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results += [int8_linear(x, w) for _ in range(5)]
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("bad", [0, 500, 999])
def test_an_error_comes_out_and_the_next_op_works(bad: int) -> None:
    torch.set_num_threads(3)
    with pytest.raises(MemoryError, match="count_up"):
        done_once(1000, 1, bad)
    assert done_once(1000, 1)


def test_callers_at_the_same_time() -> None:
    torch.set_num_threads(2)
    results: list[bool] = []
    callers = [threading.Thread(target=lambda: results.extend(done_once(300, 1) for _ in range(200))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 800 and all(results)


def test_a_fork_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    assert done_once(1000, 1)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(done_once(1000, 1) for _ in range(50)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert done_once(1000, 1)


def test_after_ctrl_c() -> None:
    """The signal arrives while tasks run; Python raises it behind the op."""
    torch.set_num_threads(2)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            while True:
                done_once(1000, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done_once(1000, 1)


def test_threads_without_work_sleep() -> None:
    """They wait for the next op for a moment, then for a lock, which costs no processor time."""
    torch.set_num_threads(4)
    assert done_once(1000, 1)
    memory, deadline = threads.team(os.getpid()).memory, time.monotonic() + 60
    while not all(memory[handover.ASLEEP + handover.LINE * number] for number in range(1, 4)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert done_once(1000, 1)


@kernel
def stopped(first: int, last: int, ended: NDArray[np.int64], caller: int) -> None:
    """Wait until both tasks have begun; the one that the caller does not have sleeps for 500 ms after the caller's."""
    ended[first] = 1
    while ended[0] + ended[1] < 2:
        usleep(100)
    if thread_self() == caller:
        ended[2] = 1
        return
    while ended[2] == 0:
        usleep(100)
    usleep(500_000)


def test_the_caller_works_alone_after_a_thread_was_stopped() -> None:
    torch.set_num_threads(2)
    team = threads.team(os.getpid())
    team.memory[handover.ALONE] = 0
    before = time.monotonic_ns()
    threads.run_ranges(stopped, 2, 1, np.zeros(3, np.int64), threading.get_ident())
    assert team.memory[handover.ALONE] > before + 16 * 200_000_000
    team.memory[handover.ALONE] = 2**62
    began = int(team.memory[handover.LAST])
    assert done_once(1000, 1) and team.memory[handover.LAST] == began  # without the others
    team.memory[handover.ALONE] = 0
    assert done_once(1000, 1) and team.memory[handover.LAST] == began + 1


def test_torch_has_one_thread_in_a_step_of_few_tokens() -> None:
    torch.set_num_threads(3)
    alone = threads.team(os.getpid()).memory[handover.ALONE :]
    for tokens, until, expected in ((1, 0, 1), (17, 0, 3), (16, 0, 1), (512, 2**62, 1), (512, 0, 3)):
        alone[0] = until
        share_cores(tokens)
        assert (torch.get_num_threads(), threads.count()) == (expected, 3)
