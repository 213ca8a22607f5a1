"""Programs that tests start: Debian's, installed where that is possible, and stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

#: A stand-in that prints its arguments, one a line.
PRINTS = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


@cache
def debian_program(name: str, package: str) -> str | None:
    """Path of a package's program; None where it is missing and apt cannot install it."""
    found = shutil.which(name)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", package]):
            subprocess.run(command, capture_output=True, check=False, env=environ)
        found = shutil.which(name)
    return found


def stand_in(folder: Path, name: str, text: str) -> str:
    """Write a program into `folder`; returns a PATH on which it comes first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
