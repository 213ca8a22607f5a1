"""SIGINT, SIGTERM and SIGHUP of the command line: one handler, one message, exit code 130.

While a command runs the handler raises KeyboardInterrupt, so that files are cleaned up; one raised in a destructor or a
callback from C, which Python drops, is raised again. Before a command the process just ends; after one its output and
code are settled, and signals are ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from glm5_ascend.errors import EXIT_INTERRUPTED

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: The system's alarm clock calls the handler again.
_RETRY = signal.SIGALRM
_RETRY_S = 0.05


def report_interrupted() -> int:
    """Print the message of an interrupted command; returns its exit code."""
    with suppress(OSError):  # standard error may be closed
        print("interrupted", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


class StopSignals:
    """The handler of the stop signals, for the main thread.

    Attributes:
        running: a command runs, and may have files to clean up.
        received: a stop signal has arrived.
    """

    def __init__(self) -> None:
        self.running = self.received = False

    def install(self) -> StopSignals:
        """Handle all stop signals that are not ignored: nohup and a shell's background job ignore some."""
        for stop in _STOP:
            if signal.getsignal(stop) is not signal.SIG_IGN:
                signal.signal(stop, self._handle)
        signal.signal(_RETRY, self._handle)
        sys.unraisablehook = _retry_dropped
        return self

    def ignore(self) -> None:
        """Ignore them from now on: the interpreter takes our handler away while it ends, and would be killed."""
        for stop in (*_STOP, _RETRY):
            signal.signal(stop, signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if not self.running:
            os._exit(report_interrupted())
        raise KeyboardInterrupt


def _retry_dropped(dropped: Any) -> None:
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
    else:
        sys.__unraisablehook__(dropped)
