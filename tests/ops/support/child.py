"""Runs a function in a forked child: what it returns, or the signal that ended it."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any


class EndedBySignal(Exception):  # noqa: N818 - a fact about the child, not about us
    """The child did not answer; `said` is what it wrote last."""


def in_child(function: Callable[[], Any]) -> Any:
    """What `function()` returns in a child process, pickled on the way.

    Raises:
        EndedBySignal: the child was ended by a signal, or ended itself.
    """
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no report of pytest's faulthandler
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        with os.fdopen(answer, "wb") as out:
            out.write(pickle.dumps(function()))
        os._exit(0)
    os.close(answer)
    with os.fdopen(answers, "rb") as file:
        message = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        raise EndedBySignal(name)
    return pickle.loads(message)
