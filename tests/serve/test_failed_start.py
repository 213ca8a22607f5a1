"""The root cause in the log of a server that failed."""

from __future__ import annotations

import pytest

from glm5_ascend.serve.failed_start import explained, root_cause

ENGINE = "(EngineCore_DP0 pid=9) ERROR 11-27 01:15:46 [core.py:946] "
WORKER = "2026-08-27T09:15:46.203+08:00 (Worker_DP0_TP0_EP0 pid=8051) ERROR 08-27 01:15:46 [multiproc_executor.py:987] "
OTHER = WORKER.replace("TP0", "TP1")
END = "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
TRACE = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([ENGINE + TRACE, ENGINE + '  File "x.py", line 1', ENGINE + "KeyError: 'layers.0.self_attn.k_norm.weight'",
          "(EngineCore_DP0 pid=9) " + TRACE, "(EngineCore_DP0 pid=9) KeyError: 'layers.0.self_attn.k_norm.weight'",
          "(APIServer pid=3) " + TRACE, END], "KeyError: 'layers.0.self_attn.k_norm.weight'"),
        ([WORKER + TRACE, WORKER + "ValueError: wrong shape", ENGINE + TRACE,
          ENGINE + "Exception: WorkerProc initialization failed. See stack trace for root cause.", END],
         "ValueError: wrong shape"),
        ([ENGINE + TRACE, ENGINE + "StopIteration", END], "StopIteration"),
        ([ENGINE + TRACE, ENGINE + "AssertionError", END], "AssertionError"),
        ([TRACE, "OSError: a", "The above exception was the direct cause of the following exception:", TRACE,
          "glm5_ascend.errors.ConfigError: b", TRACE, "RuntimeError: c"], "glm5_ascend.errors.ConfigError: b"),
        ([WORKER + TRACE, WORKER + "KeyError: 'w2'", OTHER + TRACE,
          OTHER + "torch.distributed.DistNetworkError: Connection closed by peer"], "KeyError: 'w2'"),
        (["vllm serve: error: argument --max-num-seqs: invalid int value: 'x'"],
         "vllm serve: error: argument --max-num-seqs: invalid int value: 'x'"),
        (["ImportError: optional package flash_attn", "loading", TRACE, "KeyError: 'x'"], "KeyError: 'x'"),
        (["[2026-11-27 10:00:00 TP0] Scheduler hit an exception: " + TRACE, "ValueError: Unsupported ModelSlim", ""],
         "ValueError: Unsupported ModelSlim"),
        (["loading"], "loading"),
        ([], ""),
    ],
)  # fmt: skip
def test_the_first_error_that_is_not_about_another_one(lines: list[str], cause: str) -> None:
    assert root_cause(lines) == cause


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB"),
        (1, "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        (1, "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization"),
        (1, END.replace("{}", "{'EngineCore_DP0': -9}")),
        (-9, "loading weights"),
    ],
)
def test_want_of_memory_is_named(code: int, line: str) -> None:
    _, why, fix = explained(code, [TRACE, line])
    assert "out of memory" in why and "--max-model-len" in fix


def test_a_process_of_the_engine_died() -> None:
    line = ENGINE + "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor."
    how, why, _ = explained(0, [line, ENGINE + TRACE, ENGINE + "RuntimeError: cancelled", "INFO: 500"])
    assert how == "exit code 0" and why.startswith("VllmWorker-1 died, as when the kernel")


def test_other_ends_only_quote_the_cause() -> None:
    assert explained(3, [TRACE, "KeyError: 'x'"]) == ("exit code 3", "KeyError: 'x'", "")
    assert explained(-15, []) == ("signal SIGTERM", "no output", "")
