"""Interpreters of the peers' packages that were installed before the tests."""

from __future__ import annotations

import os
from pathlib import Path

from glm5_ascend.deploy.rehearsal.environment import install, new_environment


def named_interpreter(variable: str) -> Path | None:
    """The interpreter that the environment variable names; None if it is not set."""
    if not os.environ.get(variable):
        return None
    python = Path(os.environ[variable])
    if not python.is_file():
        raise RuntimeError(f"{variable}={python}: no such interpreter")
    return python


def interpreter_with(variable: str, folder: Path, *packages: str) -> Path:
    """The interpreter that the variable names, else that of a new environment in `folder` with these packages."""
    if (python := named_interpreter(variable)) is None:
        python = new_environment(folder)
        install(python, *packages)
    return python
