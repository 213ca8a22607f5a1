"""A disk that gets full at the n-th write, or takes its time: put below a command as a sitecustomize module."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.command import environment

DISK = """
import errno, os, time
real, calls = os.pwrite, 0
def pwrite(*arguments):
    global calls
    calls += 1
    if calls > int(os.environ.get("FAIL_AFTER", "1000000")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    time.sleep(float(os.environ.get("WRITE_SECONDS", "0")))
    return real(*arguments)
os.pwrite = pwrite
"""


def on_disk(folder: Path, **settings: str) -> dict[str, str]:
    """Environment variables of a run on such a disk: FAIL_AFTER writes, WRITE_SECONDS for each."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(DISK)
    return {"PYTHONPATH": os.pathsep.join([str(folder), environment()["PYTHONPATH"]]), **settings}
