"""What a signal does while a command runs: KeyboardInterrupt, where none can be lost or taken for another error.

An import is finished first: libraries that catch everything there, and extensions that import in C, make an ImportError
of it or go on without a part. One raised in a destructor or a callback from C is dropped by Python: it is raised again.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_IMPORT = "<frozen importlib._bootstrap>"
_SOON_S = 0.05
#: An import that takes longer is not waited for: the file system may hang.
_PATIENCE_S = 10.0


class Interruption:
    """The handler of a process's stop signals, for its main thread.

    Attributes:
        came: whether such a signal has arrived.
    """

    def __init__(self) -> None:
        self.came = False
        self._since, self._number = 0.0, int(signal.SIGINT)

    def heed(self, signals: list[signal.Signals]) -> None:
        for each in signals:
            signal.signal(each, self._handle)
        sys.unraisablehook = self._dropped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if not self.came:
            self.came, self._since = True, time.monotonic()
        if _imports(frame) and time.monotonic() < self._since + _PATIENCE_S:
            _again(number)
        else:
            raise KeyboardInterrupt

    def _dropped(self, what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            _again(self._number)  # not SIGINT: what a shell starts in the background ignores that
        else:
            sys.__unraisablehook__(what)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _again(number: int) -> None:
    main = threading.main_thread().ident
    if main is not None:
        timer = threading.Timer(_SOON_S, signal.pthread_kill, (main, number))
        timer.daemon = True
        timer.start()
