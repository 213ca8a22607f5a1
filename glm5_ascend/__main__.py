"""`python -m glm5_ascend` and the console script: signals are heeded before anything large is imported."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing is begun yet, or all is done: there is nothing to clean up, and an import must not show its stack."""
    try:
        os.write(2, b"interrupted\n")
    finally:  # also where nobody reads it
        os._exit(_INTERRUPTED)


def _fill_closed_streams() -> None:
    """`2>&-`: no file that we open may become descriptor 1 or 2, where libraries write what they have to say."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:  # `print` would take stdout instead
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # as long as the process


def main() -> NoReturn:
    """Run the command line from the first import to the last line of output."""
    _fill_closed_streams()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(each, _end_at_once)
    from glm5_ascend.cli import run_process

    code = run_process(sys.argv[1:], at_end=_end_at_once)
    sys.exit(code)


if __name__ == "__main__":
    main()
