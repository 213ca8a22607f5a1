"""A temporary folder where the usual ones cannot be written: under a read-only root, importing some libraries fails."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def settle() -> None:
    """Make `tempfile`, here and in child processes, use shared memory where nothing else can be written.

    Where that cannot be written either, /tmp is named: who only asks for the name, as dill does when it is imported,
    goes on, and who writes there gets the system's error.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        chosen = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path("/tmp")
        tempfile.tempdir = os.environ["TMPDIR"] = str(chosen)
