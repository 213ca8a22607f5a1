"""Odd surroundings of a process: no writable temporary folder, a terminal that lacks characters or is gone."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def settle() -> None:
    """Before anything is printed or imported that such surroundings would end with a traceback."""
    settle_temporary_folder()
    for stream in (sys.stdout, sys.stderr):  # None where it is closed
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


class Lossy(io.TextIOWrapper):
    """Standard error whose words get lost where they cannot be written: that must not end a job of hours.

    A log on a full disk, a terminal that was closed, a reader of a pipe that has gone.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def make_stderr_lossy() -> None:
    """For all that this process prints to `sys.stderr` from now on."""
    given = sys.stderr
    if isinstance(given, io.TextIOWrapper):  # else a caller's own
        sys.stderr = Lossy(given.buffer, given.encoding, given.errors, None, given.line_buffering, given.write_through)


def settle_temporary_folder() -> None:
    """Make `tempfile`, here and in child processes, use shared memory where nothing else can be written.

    Where that cannot be written either, /tmp is named: who only asks for the name, as dill does when it is imported,
    goes on, and who writes there gets the system's error.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        chosen = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path("/tmp")
        tempfile.tempdir = os.environ["TMPDIR"] = str(chosen)
