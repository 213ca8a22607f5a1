"""Interpreters of the peers' packages that were installed before the tests."""

from __future__ import annotations

import os
from pathlib import Path


def named_interpreter(variable: str) -> Path | None:
    """The interpreter that the environment variable names; None if it is not set."""
    if not os.environ.get(variable):
        return None
    python = Path(os.environ[variable])
    if not python.is_file():
        raise RuntimeError(f"{variable}={python}: no such interpreter")
    return python
