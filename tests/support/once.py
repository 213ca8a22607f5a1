"""What all processes of one test run share: made by the first that asks, under a lock; the others wait for it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def run_folder(factory: pytest.TempPathFactory, config: pytest.Config) -> Path:
    """A folder of this run, the same for every worker of pytest-xdist."""
    own = factory.getbasetemp()
    folder = (own.parent if hasattr(config, "workerinput") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """`folder`/`name`, written by `make` unless another process has done so. Read only."""
    target, done = folder / name, folder / f"{name}.done"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(target, ignore_errors=True)  # of an attempt that failed
            make(target)
            done.touch()
    return target
