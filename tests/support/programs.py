"""Programs of Debian that tests need: installed where they are missing and that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache


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
