"""Virtual environments for the peers' packages: ours could not hold them, their pins conflict."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path

from deploy import install_cpu

TORCH = "torch==2.13.0"


def named_interpreter(variable: str) -> Path | None:
    """The interpreter that the environment variable names; None if it is not set."""
    if not os.environ.get(variable):
        return None
    python = Path(os.environ[variable])
    if not python.is_file():
        raise RuntimeError(f"{variable}={python}: no such interpreter")
    return python


def new_environment(folder: Path) -> Path:
    """Make a virtual environment with the CPU build of torch; returns its interpreter.

    torch comes first: then no other package makes pip take a CUDA build. It is looked for where `make` looks for it.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    install(python, f"{TORCH}+cpu", *install_cpu.torch_flags(python))
    return python


def pip(python: Path, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
    """Run pip for `python`; `settings` are added to its environment variables."""
    command = [str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(settings or {}), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def install(python: Path, *packages: str, settings: Mapping[str, str] | None = None) -> None:
    pip(python, "install", *packages, settings=settings)
