"""Runs commands as in a locked-down container: another user, no home, and a root file system that cannot be written."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.command import ROOT, environment

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
#: Root without the right to ignore permissions, where nobody may not enter this interpreter's folders.
BARE_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]
#: The root file system read-only for this command alone; $1 is memory that can be written.
READ_ONLY = """
mount -o bind,remount,ro / && mount -t tmpfs -o mode=1777 tmpfs "$1" && cd / || exit 99
[ "$2" = shm ] || mount -o bind,remount,ro /dev/shm || exit 99
shift 2
exec "$@"
"""
UNKNOWN = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST")


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot lock a command in; None if it can."""
    if os.geteuid() != 0:
        return "only root may make a mount namespace here"
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "unshare and setpriv (util-linux) are missing"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -o bind,remount,ro /"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip() or None


@functools.cache
def user() -> tuple[str, ...]:
    start = f"{sys.executable} -c 'import torch, glm5_ascend'"
    for prefix in (NOBODY, BARE_ROOT):
        done = subprocess.run(
            [*prefix, "sh", "-c", start], env=environment(), check=False, cwd="/", capture_output=True
        )
        if done.returncode == 0:
            return tuple(prefix)
    raise RuntimeError("no other user can run this interpreter")


def locked(
    commands: Sequence[Sequence[object]], memory: Path, shared_memory: bool = True, redirect: str = "",
    script: Path | None = None, runner: str = f"{sys.executable} -m glm5_ascend", **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `glm5-ascend` command lines one after the other until one fails, or a script that calls it as $RUN.

    Args:
        memory: a folder that is writable (and empty) for them, the only one but for shared memory and /proc.
        redirect: of the shell, e.g. ">&-". runner: what to run instead of glm5-ascend.
    """
    lines = [" ".join([runner, *(f"'{word}'" for word in command), redirect]) for command in commands]
    env = {key: value for key, value in environment().items() if key not in UNKNOWN} | variables | {"RUN": runner}
    inner = ["sh", str(script)] if script else ["sh", "-c", " && ".join(lines)]
    shm = "shm" if shared_memory else "-"
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(memory), shm, *user(), *inner]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=500, cwd=ROOT)
