"""The root cause of a server's failure, from its log."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

#: What the processes of vLLM and SGLang write before each line: time, process, level, place in the code.
_PREFIX = re.compile(
    r"^(?:\d{4}-\d\d-\d\dT\S+ )?(?:\x1b\[[\d;]*m)*(?:\([^()]*pid=\d+\)\s*)?(?:\x1b\[[\d;]*m)*"
    r"(?:(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d )?(?:\[[\w.]+:\d+\] ?)?(?:\[[\d: -]+[^\]]*\] )?"
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Iteration)(?::\s|$)")
#: Errors that only say that another process, or an earlier error, is the cause.
_GENERIC = (
    "Engine core initialization failed", "See root cause above", "See stack trace for root cause",
    "WorkerProc initialization failed", "Engine core proc", "EngineDeadError", "EngineCore encountered",
    "DistNetworkError", "DistBackendError", "Connection closed by peer", "BrokenPipeError", "ConnectionResetError",
    "Rank 0 scheduler died", "cancelled",
)  # fmt: skip
_CHAINED = ("direct cause of the following exception", "During handling of the above exception")
_MEMORY = re.compile(
    r"out of memory|OutOfMemory|OOM\b|MemoryError|can't allocate memory|Cannot allocate memory|No available memory for"
    r"|larger than the available KV cache memory|Not enough memory|NPU_ALLOC_FAILED|insufficient memory",
    re.IGNORECASE,
)
_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -9")
#: vLLM's code of a worker that has just died is mostly None.
_DIED = re.compile(r"(?:Worker|Engine core) proc (\S+) died unexpectedly")
_MEMORY_FIX = "a shorter --max-model-len, fewer --max-num-seqs; glm5-ascend plan DIR says what fits"


def root_cause(log: Sequence[str]) -> str:
    """The line of the error that ended a start; "" where the log has no line.

    It is the last exception of the first chain of tracebacks that is not about another process. Without a traceback it
    is the last line that names an error, else the last line.
    """
    lines = [stripped for line in log if (stripped := _PREFIX.sub("", line.rstrip(), count=1).strip())]
    cause, chained, traced = "", False, False
    for line in lines:
        traced = traced or "Traceback (most recent call last)" in line
        if any(words in line for words in _CHAINED):
            chained = bool(cause)
        elif traced and _EXCEPTION.match(line) and not any(words in line for words in _GENERIC):
            if cause and not chained:
                break
            cause, chained = line, False
    errors = [line for line in lines if "Error" in line or "error:" in line]
    named = [line for line in errors if not any(words in line for words in _GENERIC)]
    return cause or (named or errors or lines or [""])[-1]


def explained(code: int, log: Sequence[str]) -> tuple[str, str, str]:
    """How a server ended, why, and what to do, each a line; the last is empty if only the log says more.

    Args:
        code: exit code; a negative one is a signal.
    """
    cause, text = root_cause(log), "\n".join(log)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if died := _DIED.search(text):
        return how, f"{died[1]} died, as when the kernel ends a process for want of memory", _MEMORY_FIX
    killed = code == -signal.SIGKILL or _KILLED.search(text) is not None
    if killed and not _MEMORY.search(cause):
        return how, "a process was killed, as the kernel does when the machine is out of memory", _MEMORY_FIX
    if _MEMORY.search(cause):
        return how, f"out of memory: {cause}", _MEMORY_FIX
    return how, cause or "no output", ""
