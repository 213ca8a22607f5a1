"""Standard output and error of a process that may have no disk, no terminal and no reader."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TextIO

SHARED_MEMORY = Path("/dev/shm")


class NonFailingStderr(io.TextIOWrapper):
    """Standard error that drops what cannot be written: a full disk or a closed terminal must not end a long job."""

    original: io.TextIOWrapper

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def make_stderr_non_failing() -> None:
    """Replace `sys.stderr` by one that drops what cannot be written."""
    stream = sys.stderr
    if isinstance(stream, io.TextIOWrapper):  # not a caller's own object
        sys.stderr = NonFailingStderr(
            stream.buffer, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
        )
        sys.stderr.original = stream  # a stream without a reference closes its buffer


def prepare_process() -> None:
    """Prepare for a terminal without our characters and for a file system without a writable temporary directory.

    Where nothing else can be written, `tempfile` uses shared memory, here and in child processes. Where that cannot be
    written either, it names /tmp: libraries that only ask for the name continue, others get the system's error.
    """
    for stream in (sys.stdout, sys.stderr):  # None if closed
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    try:
        tempfile.gettempdir()
    except OSError:
        directory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path("/tmp")
        tempfile.tempdir = os.environ["TMPDIR"] = str(directory)


def discard(stream: TextIO) -> None:
    """Send the rest of a stream nowhere: Python's own last flush would fail again, with an exit code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
